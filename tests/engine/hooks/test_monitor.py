import pytest

from trainkit.engine.hooks.monitor import MetricHook, infer_mode


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
    with pytest.raises(ValueError, match='does not tell whether more is better; accepted: "max", "min"'):
        MetricHook(1, metric, "auto")


def test_a_given_mode_wins_over_the_name():
    assert (MetricHook(1, "loss", "max").mode, MetricHook(1, "error", "min").mode) == ("max", "min")
