"""Whether larger or smaller values of a metric are better, by the words of its name."""

import re
from typing import Literal

# these win over all other words
_ERRORS = {"loss", "losses", "error", "errors", "err"}
_LESS_IS_BETTER = """
    mae mse rmse rmsle mape smape msle l1 nll logloss bce xent crossentropy
    perplexity ppl bpc bpb bpd wer cer brier ece eer
    fpr fnr falsepositive falsenegative falsealarm missrate
    fid fvd kid lpips chamfer hausdorff hd epe mpjpe absrel sqrel silog crps regret latency
"""
_MORE_IS_BETTER = """
    acc accuracy aacc macc top ap map aps apm apl apr apc apf ar auc auroc auprc aucpr roc
    precision recall sensitivity specificity tpr tnr f1 fscore fbeta
    iou miou giou dice mdice jaccard kappa mcc matthews matthewscorrcoef r2
    bleu chrf rouge meteor cider psnr ssim ndcg mrr hit hits hitrate pq mota hota idf1 pck
    pearson spearman correlation nmi ari ami purity loglikelihood successrate winrate reward
"""
_NEGATIVE_LOG_LIKELIHOOD = {"negativeloglikelihood", "negloglikelihood"}
_LESS = {*_LESS_IS_BETTER.split()}
_MORE = {*_MORE_IS_BETTER.split()}


def infer_mode(metric: str) -> Literal["max", "min"] | None:
    """Whether "max" or "min" of a metric is better; None if its name does not say it.

    Whole words count: a name is split at everything but letters and digits, before digits, and
    inside of words such as ``valLoss``. "loss", "error" and "err" win over other words. The part of
    the name after the last ``/`` decides; if it says nothing, the part before it, such as ``loss``
    in ``loss/half``. Parts before these name datasets.
    """
    for part in reversed(metric.split("/")[-2:]):
        words = _words(part)
        phrases = _phrases(words)
        if phrases & _NEGATIVE_LOG_LIKELIHOOD:
            return "min"
        if words and words[0] in ("neg", "negative"):
            return None  # the loss of negative samples, or a loss times -1 as in scikit-learn
        if phrases & _ERRORS:
            return "min"
        is_less = bool(phrases & _LESS)
        is_more = bool(phrases & _MORE)
        if is_less and is_more:
            return None
        if is_less:
            return "min"
        if is_more:
            return "max"
    return None


def _words(part: str) -> list[str]:
    """The words of a name in lower case: ``top1_valLoss`` has ``top1``, ``val`` and ``loss``."""
    humps = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", part)
    return re.findall(r"[a-z0-9]+", humps.lower())


def _phrases(words: list[str]) -> set[str]:
    """Words, up to three neighbouring ones as one, and words between digits.

    Such as ``cross_entropy``, ``mAP`` and ``top5err``.
    """
    phrases = set()
    for start in range(len(words)):
        for end in range(start + 1, start + 4):
            phrases.add("".join(words[start:end]))
    for word in words:
        phrases.update(re.findall(r"[a-z]+", word))
    return phrases
