from fvcore.common.param_scheduler import CosineParamScheduler
from torch.optim import SGD

from trainkit.config import LazyCall as L
from trainkit.solver import WarmupParamScheduler, get_default_optimizer_params

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
    scheduler=L(CosineParamScheduler)(start_value=1.0, end_value=0.0), warmup_factor=1 / 1000, warmup_length=50 / 800
)
