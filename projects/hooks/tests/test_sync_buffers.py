from contextlib import nullcontext

import torch
from torch import nn

from tests.two_ranks import on_two_ranks
from trainkit.engine.hooks import CallbackHook, EMAHook, EvalHook, SyncBuffers
from trainkit.engine.step import SimpleTrainer
from trainkit.evaluation import inference_on_dataset
from trainkit.utils import comm


class Counts(nn.Module):
    """Its buffers grow by rank + 1 in each step: apart from the others' as long as nobody averages them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(2, 1))
        self.register_buffer("wide", torch.zeros((), dtype=torch.float64), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, batch):
        for buffer in self.buffers():
            buffer += comm.get_rank() + 1
        return self.weight * batch


class Stream:
    def __iter__(self):
        return iter([torch.ones(())] * 2)


def run(iters, data, *hooks, averaging=None, eval_period=0):
    """The buffer ``mean`` after each step and at the end, and what each evaluation finds."""
    model, found, seen = Counts(), [], []
    trainer = SimpleTrainer(model, data, torch.optim.SGD(model.parameters(), lr=0.0))

    def evaluate():
        with averaging.evaluated_models(model)[""] if averaging else nullcontext(model) as evaluated:
            inference_on_dataset(str, [torch.ones(())] * (2 - 2 * comm.get_rank()), None)  # rank 1 has no batch
            seen.append(evaluated.mean[0].item())

    evaluation = [EvalHook(eval_period, evaluate, eval_after_train=averaging is None)] if eval_period else []
    trainer.register_hooks([averaging, *hooks, *evaluation])
    trainer.register_hooks([CallbackHook(after_step=lambda _: found.append(model.mean[0].item()))], priority="LOW")
    trainer.train(0, iters)
    assert torch.equal(model.mean, model.mean[:1].expand(2, 1))
    assert model.wide.item() == model.mean[0].item()
    assert model.steps.item() == iters * (comm.get_rank() + 1)
    return seen if averaging else [*found, model.mean[0].item(), *seen]


def _means(rank, folder):
    two = [torch.ones(())] * 2
    return {
        "never": run(3, two),
        "each epoch and at the end": run(5, two, SyncBuffers()),
        "period": run(4, two, SyncBuffers(3)),
        "stream": run(3, Stream(), SyncBuffers()),
        "evaluation with": run(3, two, SyncBuffers(100), eval_period=2),
        "evaluation without": run(3, two, eval_period=2),
        "average with": run(3, Stream(), SyncBuffers(100), averaging=EMAHook(), eval_period=2),
        "average without": run(3, Stream(), averaging=EMAHook(), eval_period=2),
    }


def test_buffers_are_averaged_over_ranks_when_they_are_due(tmp_path):
    first, second = on_two_ranks([_means], tmp_path)["_means"]
    expected = {
        "never": ([1, 2, 3, 3], [2, 4, 6, 6]),
        # on rank 0, which adds 1 in each step; averages of 2, 4, ... steps are 3, 6, ...
        "each epoch and at the end": ([1, 3, 4, 6, 7.5, 7.5], [2, 3, 5, 6, 7.5, 7.5]),
        "period": ([1, 2, 4.5, 6, 6], [2, 4, 4.5, 6, 6]),
        "stream": ([1, 2, 4.5, 4.5], [2, 4, 4.5, 4.5]),
        # after the second step and at the end the evaluation finds averages
        "evaluation with": ([1, 3, 4.5, 4.5, 3, 4.5], [2, 3, 4.5, 4.5, 3, 4.5]),
        "evaluation without": ([1, 2, 3, 3, 2, 3], [2, 4, 6, 6, 4, 6]),
        "average with": ([3], [3]),
        "average without": ([2], [4]),
    }
    assert {name: (first[name], second[name]) for name in first} == expected
