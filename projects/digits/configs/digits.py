"""The digits job as a `LazyConfig`. See projects/lazy."""

from fvcore.common.param_scheduler import CosineParamScheduler
from torch.optim import SGD

from projects.digits import DigitsCNN, DigitsTrainTransform, DigitsTransform
from projects.digits.loaders import eval_loader, train_loader
from trainkit.config import LazyCall as L
from trainkit.evaluation import ClassificationEvaluator, LossEvaluator
from trainkit.solver import WarmupParamScheduler, get_default_optimizer_params

from .common import train

train.output_dir = "./output/lazy"
train.seed = 0
train.num_threads = 1
train.max_iter = 800  # about 43 epochs
train.eval_period = train.checkpointer.period = 200

model = L(DigitsCNN)(width=16)

dataloader = dict(
    train=L(train_loader)(
        split="train",
        transform=L(DigitsTrainTransform)(),
        total_batch_size=64,
        seed="${train.seed}",
    ),
    val=L(eval_loader)(split="val", transform=L(DigitsTransform)(), batch_size=200),
    test=L(eval_loader)(split="test", transform=L(DigitsTransform)(), batch_size=200),
    evaluator=[L(ClassificationEvaluator)(), L(LossEvaluator)()],
)

optimizer = L(SGD)(
    # the parameter groups of the model; the script gives the model as an argument
    params=L(get_default_optimizer_params)(
        base_lr="${optimizer.lr}", weight_decay="${optimizer.weight_decay}", weight_decay_norm=0.0
    ),
    lr=0.1,
    momentum=0.9,
    nesterov=True,
    weight_decay=0.001,
    fused=True,
)

# a factor on the learning rate over the whole run, whatever its length
lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(CosineParamScheduler)(start_value=1.0, end_value=0.0),
    warmup_factor=1 / 1000,
    warmup_length=50 / 800,
)
