"""Whether more or less of a metric is better, by its name, for all hooks with a mode."""

import pytest

from tests.engine.tiny import Steps
from trainkit.engine.hooks import (
    BestCheckpointer,
    BestCheckpoints,
    EarlyStopping,
    EvalHook,
    ReduceOnPlateau,
)
from trainkit.utils.direction import infer_mode

MORE = """
    acc accuracy val_acc valAcc aAcc mAcc top1 top_5 top1_acc classification/top1 mean_class_accuracy ar@100 AR_1000 auc
    AUROC roc_auc precision recall mPrecision mAP map AP AP50 bbox/AP bbox/AP75 segm/APs AP-person coco/bbox_mAP_50
    voc/mAP@0.5 mean_ap mIoU mean_iou sem_seg/mIoU IoU-cat mDice dice_3 f1 F1Score macro_f1 f1-score kappa
    cohen_kappa psnr SSIM bleu bleu4 rougeL rouge_l cider r2 mcc ndcg@10 MRR hits@10 hit_rate PQ mota idf1
    sensitivity specificity jaccard matthews_corrcoef log_likelihood success_rate loss/accuracy error_val/error/recall
"""
LESS = """
    loss val_loss valLoss VAL-LOSS total_loss tiny_val/loss/total_loss loss/loss_heatmap loss_heatmap loss_map
    acc/loss acc_loss lossAcc top_loss LOSS_top1 loss_precision heatmap/loss loss/heatmap
    loss2 loss_cls_0 val.loss accuracy_error error top5_error errorRate err err@1 top1err test_err_acc acc/error
    mae MAE mse val_mse rmse trainRMSE mape l1_error perplexity ppl val/ppl wer CER fid FID50k nll val_nll
    negative_log_likelihood cross_entropy bce brier_score ece EER hd95 chamfer lpips EPE mpjpe bpc
    false_positive_rate fpr depth/abs_rel loss/half log_loss losses errors mean_absolute_error
"""
NOTHING = """
    heatmap score speed value heaptop lossless roadmap mapping terror accident stopper desktop laplace
    interrupt overrated inferred x/y recall_at_fpr95 neg_log_loss neg_mean_squared_error rank1 images/seen
    floss airmapper bloss erratic
"""


def test_the_direction_comes_from_whole_words_of_the_name_and_a_loss_or_an_error_wins():
    found = {name: infer_mode(name) for text in (MORE, LESS, NOTHING) for name in text.split()}
    expected = dict.fromkeys(MORE.split(), "max") | dict.fromkeys(LESS.split(), "min")
    expected |= dict.fromkeys(NOTHING.split())
    assert {name: mode for name, mode in found.items() if mode != expected[name]} == {}


def test_a_loss_that_falls_does_not_stop_the_run_and_the_log_says_why(caplog):
    values = iter([0.9, 0.8, 0.7, 0.6])
    trainer = Steps(
        [
            EvalHook(1, lambda: {"val_loss": next(values)}, eval_after_train=False),
            EarlyStopping(1, "val_loss", patience=2),
        ]
    )
    caplog.set_level("INFO")
    hook = EarlyStopping(1, "val_loss")
    [text] = [text for text in caplog.messages if text.startswith("EarlyStopping: ")]
    assert "smaller val_loss is better" in text
    assert "set mode" in text
    trainer.train(0, 4)
    assert trainer.iter == 4
    assert hook.mode == "min"


class NoFiles:
    """A checkpointer that notes the iterations of its saves."""

    save_dir, save_to_disk = "", False

    def __init__(self):
        self.saved = []

    def save(self, name, iteration):
        self.saved.append(iteration)


@pytest.mark.parametrize(("name", "kept"), [("loss/loss_heatmap", [0, 1, 2]), ("bbox/AP", [0])])
def test_the_best_model_is_that_of_the_smallest_loss_or_the_largest_precision(name, kept):
    values, recorder = iter([0.9, 0.8, 0.7]), NoFiles()
    trainer = Steps(
        [
            EvalHook(1, lambda: {name: next(values)}, eval_after_train=False),
            BestCheckpointer(1, recorder, name),
        ]
    )
    trainer.train(0, 3)
    assert recorder.saved == kept


@pytest.mark.parametrize(
    "make",
    [
        lambda name, **kwargs: EarlyStopping(1, name, **kwargs),
        lambda name, **kwargs: BestCheckpointer(1, None, name, **kwargs),
        lambda name, **kwargs: BestCheckpoints(1, None, name, **kwargs),
        lambda name, **kwargs: ReduceOnPlateau(1, name, **kwargs),
    ],
    ids=["EarlyStopping", "BestCheckpointer", "BestCheckpoints", "ReduceOnPlateau"],
)
def test_every_hook_with_a_mode_asks_the_name_and_warns_where_it_says_nothing_or_the_opposite(
    make, caplog
):
    assert make("val_loss").mode == "min"
    assert make("top1").mode == "max"
    assert caplog.text == ""
    assert make("speed").mode == "max"
    assert "the name 'speed' does not say whether more is better" in caplog.text
    assert 'mode is "max"' in caplog.text
    caplog.clear()
    assert make("speed", mode="min").mode == "min"
    assert caplog.text == ""
    assert make("val_loss", mode="max").mode == "max"
    assert "mode is 'max'" in caplog.text
    assert "'val_loss' smaller values are better" in caplog.text
    with pytest.raises(ValueError, match='mode must be "max", "min" or "auto", got \'most\''):
        make("top1", mode="most")
