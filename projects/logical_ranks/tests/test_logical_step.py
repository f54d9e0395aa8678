"""A step with logical ranks in one process: test_same_bits_on_any_processes.py has several."""

import pytest
import torch
from torch import nn
from trainkit.projects.logical_ranks.trainer import LogicalTrainer

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Regression, batches, scalars, sgd
from trainkit.config import ConfigError, check_values
from trainkit.utils import comm


class Parts(list):
    """Batches of logical ranks, as they come in one process."""

    logical_ranks, seed = 4, 0


ORDER = [0, 2, 1, 3]  # in which the process computes them


def parts(count, size=2):
    return Parts(batches(4 * count, size))


def trainer(model, data=None, **options):
    comm.set_data_ranks(0, 4)
    return LogicalTrainer(model, parts(3) if data is None else data, sgd(model), **options)


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_and_losses_are_added_in_a_tree_over_logical_ranks_after_the_micro_batches_of_each(steps):
    model, data, each = Regression(), parts(steps), []
    made = trainer(model, data, accumulation_steps=steps)
    made.optimizer.param_groups[0]["lr"] = 0.0
    made.train(7, 8)

    for batch in data:  # [logical rank in their order of computation, micro-batch]
        of_one = Regression()
        loss = of_one(batch)
        (loss / len(data)).backward()
        each.append([loss.double().detach() / steps, *(parameter.grad for parameter in of_one.parameters())])
    for place, name in enumerate(["total_loss", *model.parameters()]):
        values = [sum(each[steps * i + step][place] for step in range(steps)) for i in range(4)]
        by_rank = dict(zip(ORDER, values, strict=True))
        tree = (by_rank[0] + by_rank[2]) + (by_rank[1] + by_rank[3])
        if place:
            assert torch.equal(name.grad, tree)
        elif steps == 1:
            assert scalars(made)[name] == [((tree / 4).item(), 7)]


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, batch):
        return (self.weight * self.norm(batch[0])).square().mean()


def test_running_statistics_are_the_mean_of_those_of_the_logical_ranks_each_from_the_state_before_the_step():
    model, data = Norm(), parts(2)
    made = trainer(model, data)
    made.train(0, 1)
    for name in ("running_mean", "running_var"):
        each = []
        for batch in data[:4]:
            norm = nn.BatchNorm1d(3)
            norm(batch[0])
            each.append(getattr(norm, name).double() / 4)
        mean = (each[0] + each[1]) + (each[2] + each[3])  # in double precision, rounded once
        assert torch.equal(getattr(model.norm, name), mean.float())
    assert model.norm.num_batches_tracked == 1


class Queue(Regression):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(3))

    def forward(self, batch):
        self.queue[0] += 1
        return super().forward(batch)


def test_a_model_that_writes_other_buffers_is_refused_with_their_names():
    with pytest.raises(ValueError, match="only the statistics of normalization layers"):
        trainer(Queue()).train(0, 1)


@pytest.mark.parametrize("module", [nn.SyncBatchNorm(3), nn.Embedding(3, 3, sparse=True)])
def test_what_cannot_be_added_in_a_tree_is_refused(module):
    with pytest.raises(ConfigError, match="excludes SyncBatchNorm and sparse gradients, as in 1"):
        trainer(nn.Sequential(nn.Linear(3, 3), module))


@pytest.mark.parametrize("key", ["SOLVER.GRAPH.ENABLED", "MODEL.DDP.BROADCAST_BUFFERS", "TEST.PRECISE_BN.ENABLED"])
def test_settings_whose_sums_depend_on_the_number_of_processes_are_refused(key, tmp_path):
    with pytest.raises(ConfigError, match=f"SOLVER.LOGICAL_RANKS and {key}.* exclude each other"):
        check_values(tiny_cfg(tmp_path, "SOLVER.LOGICAL_RANKS", 4, key, True))


@pytest.mark.parametrize(("number", "world_size"), [(6, 1), (4, 8)])
def test_a_number_that_no_tree_has_or_that_processes_cannot_share_is_refused(number, world_size, tmp_path, monkeypatch):
    monkeypatch.setattr("trainkit.utils.comm.get_world_size", lambda: world_size)
    with pytest.raises(ConfigError, match=f"LOGICAL_RANKS: got {number} .* a multiple of {world_size}"):
        check_values(tiny_cfg(tmp_path, "SOLVER.LOGICAL_RANKS", number))
