"""The digits job. See README.md."""

from .common import train
from .data import dataloader
from .model import model
from .optimizer import lr_multiplier, optimizer

train.output_dir = "./output/lazy"
train.seed = 0
train.max_iter = 800  # about 43 epochs
train.eval_period = train.checkpointer.period = 200
