import pytest

from tests.two_ranks import on_two_ranks
from trainkit.engine.hooks import BestCheckpointer
from trainkit.engine.hooks.monitor import MetricHook, check_monitored_metrics, infer_mode
from trainkit.utils import comm


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        *((key, "max") for key in ("acc", "top", "AR@", "auc", "precision", "mAP", "mDice", "mIoU", "mAcc", "aAcc")),
        ("loss", "min"),
        ("classification/top1", "max"),
        ("classification/mean_class_accuracy", "max"),
        ("coco/bbox_mAP_50", "max"),
        ("AR@100", "max"),
        ("tiny_val/loss/total_loss", "min"),
        ("val/LOSS_cls", "min"),
        ("acc_loss", "max"),  # more before less
        ("heatmap/loss", "min"),  # the names of data do not count
    ],
)
def test_the_mode_is_inferred_from_the_last_part_of_the_name(metric, mode):
    assert infer_mode(metric) == mode
    assert MetricHook(1, metric, "auto").mode == mode


@pytest.mark.parametrize("metric", ["error", "acc/error", "loss/", "psnr"])
def test_a_name_that_tells_nothing_is_an_error_that_names_the_remedy(metric):
    message = (
        r'does not tell whether more or less is better; set its mode to "max" or "min" \(in the config: CHECKPOINT'
    )
    with pytest.raises(ValueError, match=message):
        MetricHook(1, metric, "auto")


def test_a_given_mode_wins_over_the_name():
    assert (MetricHook(1, "loss", "max").mode, MetricHook(1, "error", "min").mode) == ("max", "min")


def _results_of_rank_0_alone(rank, folder):
    def evaluate():
        if rank == 0:
            raise KeyError("a class that one batch does not have")
        return {}

    hook = BestCheckpointer(1, None, "top1")
    check_monitored_metrics([hook], evaluate)
    return comm.all_gather(rank)  # hangs or is something else if a rank still waits


@pytest.mark.slow
def test_an_evaluation_of_one_batch_that_fails_on_rank_0_alone_leaves_no_rank_waiting(tmp_path):
    found = on_two_ranks([_results_of_rank_0_alone], tmp_path)
    assert found == {"_results_of_rank_0_alone": [[0, 1], [0, 1]]}


def _batch_of_rank_1_alone(rank, folder):
    def one_batch():
        if rank == 1:
            raise ValueError("a broken sample")
        comm.all_gather(rank)  # at the end of the batches ranks wait for each other
        return {}

    check_monitored_metrics([BestCheckpointer(1, None, "top1")], one_batch)


@pytest.mark.slow
def test_a_batch_that_fails_on_one_rank_ends_the_run_instead_of_leaving_other_ranks_waiting(tmp_path):
    [[of_rank_0, of_rank_1]] = on_two_ranks([_batch_of_rank_1_alone], tmp_path).values()
    assert of_rank_0.startswith("RuntimeError: ")
    assert of_rank_1 == "ValueError: a broken sample"
