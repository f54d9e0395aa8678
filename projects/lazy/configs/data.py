from projects.digits import DigitsTrainTransform, DigitsTransform
from projects.digits.loaders import eval_loader, train_loader
from trainkit.config import LazyCall as L
from trainkit.evaluation import ClassificationEvaluator, LossEvaluator

dataloader = dict(
    train=L(train_loader)(
        split="train", transform=L(DigitsTrainTransform)(), total_batch_size=64, seed="${train.seed}"
    ),
    val=L(eval_loader)(split="val", transform=L(DigitsTransform)(), batch_size=200),
    test=L(eval_loader)(split="test", transform=L(DigitsTransform)(), batch_size=200),
    evaluator=[L(ClassificationEvaluator)(), L(LossEvaluator)()],
)
