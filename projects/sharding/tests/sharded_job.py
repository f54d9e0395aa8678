"""A job with ``MODEL.PARALLEL: fsdp``, and what its runs must have in common."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import scalars
from trainkit.engine import DefaultTrainer
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils import comm


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@MODEL_REGISTRY.register()
class Blocks(nn.Module):
    """Without batch norm and dropout; numbers of rows that ranks and groups do not divide. ``drawn`` is random."""

    def __init__(self, cfg):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.embed, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.full((6,), 0.5), persistent=False)

    def forward(self, batch):
        x = self.embed(batch["x"]) * self.scale
        for block in self.blocks:
            x = block(x)
        if not self.training:
            return self.head(x)
        return {
            "loss_cls": nn.functional.cross_entropy(self.head(x), batch["label"]),
            "drawn": torch.rand(()),
        }


EMA = {"NAME": "EMAHook", "DECAY": 0.5, "EVALUATE": "both"}


def job(folder, *options):
    """Adam, clipping by the norm, an average; 10 iterations of 8 samples; 10 test samples one by one on each rank."""
    options = [
        "SOLVER.OPTIMIZER.NAME",
        "AdamW",
        "SOLVER.CLIP_GRADIENTS.ENABLED",
        True,
        "HOOKS",
        [EMA],
        *options,
    ]
    options += [
        "SOLVER.CLIP_GRADIENTS.CLIP_TYPE",
        "full_model",
        "SOLVER.CLIP_GRADIENTS.CLIP_VALUE",
        0.05,
    ]
    options += [
        "TEST.IMS_PER_BATCH",
        1,
        "TEST.EVALUATORS",
        ["ClassificationEvaluator", "LossEvaluator"],
    ]
    return tiny_cfg(
        Path(folder),
        "MODEL.NAME",
        "Blocks",
        "SOLVER.BASE_LR",
        0.01,
        "MODEL.PARALLEL",
        "fsdp",
        *options,
    )


def train(cfg, resume=False, hooks=(), until=None, trainer_type=DefaultTrainer):
    """The trainer after the run."""
    torch.manual_seed(100 + comm.get_rank())  # other weights on each rank
    trainer = trainer_type(cfg)
    trainer.register_hooks(hooks)
    trainer.resume_or_load(resume=resume)
    trainer.train(max_iter=until)
    return trainer


def from_middle_of(folder, of, name):
    """The folder of a run that is to go on from iteration 5 of another one."""
    if comm.is_main_process():
        left_out = shutil.ignore_patterns("model_final*", "finished")
        shutil.copytree(f"{folder}/{of}/", f"{folder}/{name}", ignore=left_out)
        Path(folder, name, "last_checkpoint").write_text("model_0000004.pth", encoding="utf-8")
    comm.synchronize()
    return f"{folder}/{name}"


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def outcome(trainer):
    """What has to be the same, whatever each rank holds."""
    (average,) = (hook for hook in trainer.hooks if type(hook).__name__ == "EMAHook")
    states, losses = trainer.optimizer.state_dict()["state"], scalars(trainer)
    return {
        "weights": {name: whole(value) for name, value in trainer.model.state_dict().items()},
        "optimizer": [
            {name: whole(value) for name, value in state.items()} for state in states.values()
        ],
        "average": {name: whole(value) for name, value in average.state_dict()["model"].items()},
        "losses": losses["total_loss"],
        "norms": losses["grad_norm"],
        "results": {
            name: losses[name] for name in losses if name.endswith(("/top1", "/total_loss"))
        },
    }


def assert_close(found, expected):
    for key in ("weights", "optimizer", "average"):
        torch.testing.assert_close(found[key], expected[key], atol=1e-5, rtol=1e-5)
    steps = {iter: value for value, iter in expected["losses"]}
    assert found["losses"] == [
        (pytest.approx(steps[iter], abs=1e-5), iter) for _, iter in found["losses"]
    ]


def assert_same_bits(found, expected):
    for key in ("weights", "optimizer", "average"):
        torch.testing.assert_close(found[key], expected[key], atol=0, rtol=0)
    for key in ("losses", "norms", "results"):
        assert found[key] == expected[key]
