"""Options of a model: the same numbers, by another way."""

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import scalars
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import CallbackHook
from trainkit.modeling import MODEL_REGISTRY

pytestmark = pytest.mark.slow  # models that are compiled, and whole runs

COMPILED = ["MODEL.COMPILE.ENABLED", True, "MODEL.COMPILE.BACKEND", "eager"]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return self.layers(x)


class Normed(nn.Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.ReLU(inplace=True)
        )

    def forward(self, x):
        return self.layers(x)


@MODEL_REGISTRY.register()
class OfBlocks(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.blocks = nn.Sequential(Counting(), Counting())
        self.conv = nn.Conv2d(1, 2, 2)
        self.head = nn.Linear(6, 2)

    def forward(self, batch):
        x = self.conv(self.blocks(batch["x"]).unflatten(1, (1, 2, 2))).flatten(1)
        logits = self.head(torch.cat([x, batch["x"]], 1))
        if not self.training:
            return logits
        compiled = torch.full((), float(torch.compiler.is_compiling()))
        return {
            "loss_cls": nn.functional.cross_entropy(logits, batch["label"]),
            "compiled": compiled,
        }


@MODEL_REGISTRY.register()
class OfNormedBlocks(OfBlocks):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.blocks = nn.Sequential(Normed(), Normed(momentum=None), Normed())
        self.blocks[2].eval()  # frozen
        self.blocks[2].train = lambda mode: None


def train(folder, *options, resume=False, stop_at=None):
    torch.compiler.reset()  # what another test has compiled of the same class does not count
    torch.manual_seed(1)
    hooks = ["HOOKS", [{"NAME": "EMAHook"}]]
    trainer = DefaultTrainer(tiny_cfg(folder, "MODEL.NAME", "OfBlocks", *hooks, *options))
    trainer.resume_or_load(resume=resume)
    stop = CallbackHook(
        after_step=lambda trainer: trainer.request_stop("test") if trainer.iter == stop_at else None
    )
    trainer.register_hooks([stop])
    trainer.train()
    return trainer


def assert_same_run(found, expected):
    torch.testing.assert_close(
        found.model.state_dict(), expected.model.state_dict(), rtol=0, atol=0
    )
    assert scalars(found)["total_loss"] == scalars(expected)["total_loss"]


def test_blocks_are_computed_again_in_the_backward_pass_with_the_same_random_numbers(tmp_path):
    blocks = ("MODEL.ACTIVATION_CHECKPOINT.BLOCKS", ["Counting"])
    plain = train(tmp_path / "plain")
    again = train(tmp_path / "again", *blocks)
    train(tmp_path / "pieces", *blocks, stop_at=4)
    resumed = train(tmp_path / "pieces", *blocks, resume=True)
    assert_same_run(again, plain)
    assert_same_run(resumed, plain)
    calls = [[block.num_calls for block in trainer.model.blocks] for trainer in (again, plain)]
    # in each iteration, in no evaluation
    assert [more - less for more, less in zip(*calls, strict=True)] == [
        10,
        10,
    ]
    with pytest.raises(ConfigError, match="COMPILE.MODE: got 'fast'"):
        train(tmp_path, *COMPILED, "MODEL.COMPILE.MODE", "fast")
    with pytest.raises(ConfigError, match=r"BLOCKS: got \['Count'\].*accepted: .*Counting"):
        train(tmp_path, blocks[0], ["Count"])


def test_batch_norms_of_blocks_count_each_batch_once(tmp_path):
    normed = ("MODEL.NAME", "OfNormedBlocks", "SOLVER.ACCUMULATION_STEPS", 2)
    plain = train(tmp_path / "plain", *normed)
    again = train(tmp_path / "again", *normed, "MODEL.ACTIVATION_CHECKPOINT.BLOCKS", ["Normed"])
    assert_same_run(again, plain)
    assert [int(block.layers[1].num_batches_tracked) for block in again.model.blocks] == [20, 20, 0]
    assert [block.layers[1].momentum for block in again.model.blocks] == [0.1, None, 0.1]


def test_weights_of_convolutions_have_their_channels_last_after_a_resume_too(tmp_path):
    whole = train(tmp_path / "whole", "MODEL.CHANNELS_LAST", True)
    train(tmp_path / "pieces", "MODEL.CHANNELS_LAST", True, stop_at=4)
    resumed = train(tmp_path / "pieces", "MODEL.CHANNELS_LAST", True, resume=True)
    assert_same_run(resumed, whole)
    plain = train(tmp_path / "plain", "SOLVER.CHECKPOINT_PERIOD", 5)
    strides = [trainer.model.conv.weight.stride() for trainer in (whole, resumed, plain)]
    assert strides == [(4, 1, 2, 1), (4, 1, 2, 1), (4, 4, 2, 1)]
    (tmp_path / "plain/last_checkpoint").write_text("model_0000004.pth")
    changed = train(tmp_path / "plain", "MODEL.CHANNELS_LAST", True, resume=True)
    # up to rounding
    torch.testing.assert_close(changed.model.state_dict(), plain.model.state_dict())


def test_a_model_is_compiled_in_place_and_its_run_is_resumed_without_compilation(tmp_path):
    trainer = train(tmp_path, *COMPILED, stop_at=4)
    resumed = train(tmp_path, resume=True)
    assert {value for value, _ in scalars(trainer)["compiled"]} == {1.0}
    assert resumed.start_iter == 5
    assert resumed.iter == 10
    assert [value for value, _ in scalars(resumed)["compiled"]] == [1.0] * 5 + [0.0] * 5
    assert list(trainer.model.state_dict()) == list(resumed.model.state_dict())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["MODEL.COMPILE.DYNAMIC", True], []),
        (["MODEL.COMPILE.DYNAMIC", None], ["MODEL.COMPILE.DYNAMIC None"]),
        (
            ["MODEL.COMPILE.MODE", "max-autotune", "MODEL.COMPILE.BACKEND", "inductor"],
            ["MODEL.COMPILE.MODE max-autotune"],
        ),
    ],
)
def test_settings_under_which_a_resumed_run_may_differ_are_named(tmp_path, caplog, options, named):
    DefaultTrainer(tiny_cfg(tmp_path, *COMPILED, *options))
    assert [text.partition(":")[0] for text in caplog.messages if "may differ" in text] == named
