"""The loop reads no tensor but the scalars of its record: on an accelerator every other read would wait for it."""

import itertools
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import CallbackHook

READS = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
}
READS |= {"aten::bincount"}


class CountReads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name().partition(".")[0] in READS:
            self.counts[function.name()] += 1
        return function(*args, **(kwargs or {}))


class Trainer(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(20, 8, 4, generator=generator)
        return [{"x": x, "label": (x.sum(1) > 0).long()} for x in inputs]


EVERYTHING = [
    *(
        "SOLVER.MAX_ITER",
        100,
        "SOLVER.CHECKPOINT_PERIOD",
        1000,
        "TEST.EVAL_PERIOD",
        0,
        "LOG.PERIOD",
        20,
    ),
    *("SOLVER.AMP.ENABLED", True, "SOLVER.OPTIMIZER.FUSED", True, "LOG.ASYNC", True),
    *("SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "full_model"),
    *(
        "HOOKS",
        [{"NAME": "EMAHook"}, {"NAME": "GarbageCollection", "PERIOD": 10}, {"NAME": "RuntimeInfo"}],
    ),
]


def reads_per_iteration(tmp_path, *options, hook=None):
    trainer = Trainer(tiny_cfg(tmp_path, *EVERYTHING, *options))
    counts = []
    with CountReads() as reads:
        trainer.register_hooks(
            [
                hook,
                CallbackHook(after_step=lambda trainer: counts.append(sum(reads.counts.values()))),
            ]
        )
        trainer.train()
    # an evaluation follows the last one
    return [after - before for before, after in itertools.pairwise(counts[:-1])]


@pytest.mark.parametrize(
    ("options", "num_scalars"),
    [
        ([], 4),  # total_loss, grad_norm, whether the update is skipped, the scale
        (["SOLVER.AMP.PRECISION", "bfloat16", "SOLVER.NON_FINITE.POLICY", "skip"], 3),
        (["SOLVER.ACCUMULATION_STEPS", 2], 4),
    ],
    ids=["float16", "skip", "accumulation"],
)
def test_an_iteration_reads_the_scalars_of_its_record_and_nothing_else(
    tmp_path, options, num_scalars
):
    first, *found = reads_per_iteration(tmp_path, *options)
    assert len(found) == 97
    assert max(found) == num_scalars  # fewer where the scaler skips an update
    # once per run it is asked whether a file can hold the state, and a scaler reads its two numbers for that
    assert first <= num_scalars + 2


def test_the_count_notices_a_hook_that_reads_one(tmp_path):
    for read in (
        lambda trainer: bool(trainer.losses["loss_cls"] > 1),
        lambda trainer: trainer.batch["x"].nonzero(),
    ):
        hook = CallbackHook(
            after_step=lambda trainer, read=read: trainer.iter == 50 and read(trainer)
        )
        found = reads_per_iteration(tmp_path, "SOLVER.AMP.PRECISION", "bfloat16", hook=hook)
        assert found == [2] * 49 + [3] + [2] * 48
