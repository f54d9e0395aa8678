"""``MODEL.ACTIVATION_CHECKPOINT`` and ``MODEL.CHANNELS_LAST``: the same numbers, by another way."""

import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import scalars
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import CallbackHook
from trainkit.modeling import MODEL_REGISTRY

BLOCKS = ("MODEL.ACTIVATION_CHECKPOINT.BLOCKS", ["Counting"])


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return self.layers(x)


@MODEL_REGISTRY.register()
class OfCountingBlocks(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.blocks = nn.Sequential(Counting(), Counting())
        self.conv = nn.Conv2d(1, 2, 2)
        self.head = nn.Linear(6, 2)

    def forward(self, batch):
        x = self.conv(self.blocks(batch["x"]).unflatten(1, (1, 2, 2))).flatten(1)
        logits = self.head(torch.cat([x, batch["x"]], 1))
        return logits if not self.training else {"loss_cls": nn.functional.cross_entropy(logits, batch["label"])}


def train(folder, *options, resume=False, stop_at=None):
    torch.manual_seed(1)
    trainer = DefaultTrainer(
        tiny_cfg(folder, "MODEL.NAME", "OfCountingBlocks", "HOOKS", [{"NAME": "EMAHook"}], *options)
    )
    trainer.resume_or_load(resume=resume)
    stop = CallbackHook(after_step=lambda trainer: trainer.request_stop("test") if trainer.iter == stop_at else None)
    trainer.register_hooks([stop])
    trainer.train()
    return trainer


def calls(trainer):
    return [block.num_calls for block in trainer.model.blocks]


def assert_same_run(found, expected):
    torch.testing.assert_close(found.model.state_dict(), expected.model.state_dict(), rtol=0, atol=0)
    assert scalars(found)["total_loss"] == scalars(expected)["total_loss"]


def test_blocks_are_computed_again_in_the_backward_pass_with_the_same_random_numbers(tmp_path):
    plain = train(tmp_path / "plain", "MODEL.CHANNELS_LAST", False)
    again = train(tmp_path / "again", *BLOCKS)
    train(tmp_path / "pieces", *BLOCKS, stop_at=4)
    resumed = train(tmp_path / "pieces", *BLOCKS, resume=True)

    assert_same_run(again, plain)
    assert_same_run(resumed, plain)
    extra = [more - less for more, less in zip(calls(again), calls(plain), strict=True)]
    assert extra == [10, 10]  # once more in each iteration, and in no evaluation


class Normed(nn.Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.ReLU(inplace=True))

    def forward(self, x):
        return self.layers(x)


@MODEL_REGISTRY.register()
class OfNormedBlocks(OfCountingBlocks):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.blocks = nn.Sequential(Normed(), Normed(momentum=None), Normed())
        self.blocks[2].eval()  # frozen
        self.blocks[2].train = lambda mode: None


def test_batch_norms_of_blocks_count_each_batch_once(tmp_path):
    normed = ("MODEL.NAME", "OfNormedBlocks", "SOLVER.ACCUMULATION_STEPS", 2)
    plain = train(tmp_path / "plain", *normed)
    blocks = ("MODEL.ACTIVATION_CHECKPOINT.BLOCKS", ["Normed"])
    again = train(tmp_path / "again", *normed, *blocks)

    assert_same_run(again, plain)
    assert [int(block.layers[1].num_batches_tracked) for block in again.model.blocks] == [20, 20, 0]
    assert [block.layers[1].momentum for block in again.model.blocks] == [0.1, None, 0.1]


def test_weights_of_convolutions_have_their_channels_last_after_a_resume_too(tmp_path):
    whole = train(tmp_path / "whole", "MODEL.CHANNELS_LAST", True)
    train(tmp_path / "pieces", "MODEL.CHANNELS_LAST", True, stop_at=4)
    resumed = train(tmp_path / "pieces", "MODEL.CHANNELS_LAST", True, resume=True)

    assert_same_run(resumed, whole)
    plain = train(tmp_path / "plain")
    strides = [trainer.model.conv.weight.stride() for trainer in (whole, resumed, plain)]
    assert strides == [(4, 1, 2, 1), (4, 1, 2, 1), (4, 4, 2, 1)]
