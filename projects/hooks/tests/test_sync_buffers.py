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
        if self.training:
            for buffer in self.buffers():
                buffer += comm.get_rank() + 1
        return self.weight * batch


def means(hooks, iters, loader, start_iter=0):
    """The value of the buffer ``mean`` after each step and at the end."""
    model = Counts()
    trainer = SimpleTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.0))
    found = []
    note = CallbackHook(after_step=lambda _: found.append(model.mean[0].item()))
    trainer.register_hooks(hooks(model))
    trainer.register_hooks([note], priority="LOW")
    trainer.train(start_iter, iters)
    assert torch.equal(model.mean, model.mean[:1].expand(2, 1))
    assert model.wide.item() == model.mean[0].item()
    assert model.steps.item() == (iters - start_iter) * (comm.get_rank() + 1)
    return [*found, model.mean[0].item()]


def evaluation(period):
    """A hook that evaluates two batches on rank 0 and none on rank 1, and what the evaluated model had."""
    seen = []

    def make(model):
        def evaluate():
            inference_on_dataset(model, [torch.ones(())] * (2 - 2 * comm.get_rank()), None)
            seen.append(model.mean[0].item())

        return EvalHook(period, evaluate)

    return make, seen


def evaluated_average(hooks):
    """The buffer ``mean`` that an averaged model has while it is evaluated, two steps after the start."""
    model, averaging, seen = Counts(), EMAHook(), []
    trainer = SimpleTrainer(model, Stream(), torch.optim.SGD(model.parameters(), lr=0.0))

    def evaluate():
        with averaging.evaluated_models(model)[""] as averaged:
            inference_on_dataset(lambda batch: seen.append(averaged.mean[0].item()), [torch.ones(())], None)

    trainer.register_hooks([averaging, *hooks, EvalHook(2, evaluate, eval_after_train=False)])
    trainer.train(0, 3)
    return seen


class Stream:
    def __iter__(self):
        return iter([torch.ones(())] * 2)


def _means(rank, folder):
    own = rank + 1
    two = [torch.ones(())] * 2
    results = {
        "never": means(lambda model: [], 3, two) == [own, 2 * own, 3 * own, 3 * own],
        "each epoch and at the end": means(lambda model: [SyncBuffers()], 5, two),
        "period": means(lambda model: [SyncBuffers(3)], 4, two),
        "stream": means(lambda model: [SyncBuffers()], 3, Stream()),
    }
    for name, hooks in (("with", lambda model: [SyncBuffers(100)]), ("without", lambda model: [])):
        evaluate, seen = evaluation(2)
        results[f"evaluation {name}"] = means(
            lambda model, make=evaluate, hooks=hooks: [*hooks(model), make(model)], 3, two
        )
        results[f"evaluated {name}"] = seen
    for name, hooks in (("with", [SyncBuffers(100)]), ("without", [])):
        results[f"averaged weights {name}"] = evaluated_average(hooks)
    return results


def test_buffers_are_averaged_over_ranks_when_they_are_due(tmp_path):
    first, second = on_two_ranks([_means], tmp_path)["_means"]
    assert first["never"] is second["never"] is True
    expected = {
        # on rank 0, which adds 1 in each step; averages of 2, 4, ... steps are 3, 6, ...
        "each epoch and at the end": ([1, 3, 4, 6, 7.5, 7.5], [2, 3, 5, 6, 7.5, 7.5]),
        "period": ([1, 2, 4.5, 6, 6], [2, 4, 4.5, 6, 6]),
        "stream": ([1, 2, 4.5, 4.5], [2, 4, 4.5, 4.5]),
        # behind the second step the evaluation finds averages
        "evaluation with": ([1, 3, 4.5, 4.5], [2, 3, 4.5, 4.5]),
        "evaluated with": ([3, 4.5], [3, 4.5]),
        "evaluation without": ([1, 2, 3, 3], [2, 4, 6, 6]),
        "evaluated without": ([2, 3], [4, 6]),
        "averaged weights with": ([3], [3]),
        "averaged weights without": ([2], [4]),
    }
    for name, values in expected.items():
        assert (first[name], second[name]) == values, name
