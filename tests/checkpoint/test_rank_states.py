"""What each rank has for itself is in the one file that rank 0 writes."""

import os

import pytest
import torch
from torch import nn

from tests.engine.tiny import Steps
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer
from trainkit.checkpoint.ranks import digests_of
from trainkit.engine import hooks
from trainkit.engine.hook_base import HookBase


class Part:
    """A state of which ``own`` differs between ranks."""

    rank_keys = ("own",)

    def __init__(self, rank, size=3):
        self.state = {
            "own": {"rank": rank, "list": [torch.tensor([float(rank)])], "same": torch.ones(size)},
            "shared": torch.full((size,), float(rank)),
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def norm(rank):
    layer = nn.BatchNorm1d(2)
    nn.init.constant_(layer.weight, rank)
    layer.running_mean.fill_(rank + 1)
    return layer


def each_rank_gets_its_own_part_and_buffers_back(rank, folder):
    folder = os.path.join(folder, "own")
    Checkpointer(norm(rank), folder, part=Part(rank)).save("a")
    model, part = norm(7), Part(7)
    Checkpointer(model, folder, part=part).resume_or_load("")
    own = part.state["own"]
    return (
        (own["rank"], own["list"][0].item(), own["same"].tolist()),
        (part.state["shared"].tolist(), model.weight.tolist(), model.running_mean.tolist()),
    )


def what_ranks_have_in_common_is_in_the_file_once(rank, folder):
    sizes = []
    for name, size in (("small", 1), ("large", 100_000)):
        place = os.path.join(folder, name)
        Checkpointer(nn.Linear(1, 1), place, part=Part(rank, size)).save("a")
        if rank == 0:
            sizes.append(os.path.getsize(os.path.join(place, "a.pth")))
    return round((sizes[1] - sizes[0]) / 400_000, 1) if rank == 0 else None


def a_file_of_two_ranks_gives_one_process_the_state_of_rank_0(rank, folder):
    Checkpointer(norm(rank), os.path.join(folder, "for_one"), part=Part(rank)).save("a")


class Saver(HookBase):
    def __init__(self, checkpointer):
        self.checkpointer = checkpointer

    def after_step(self):
        self.checkpointer.save("a")


def a_checkpointer_on_rank_0_alone_waits_for_nobody(rank, folder):
    trainer = Steps()
    checkpointer = Checkpointer(nn.Linear(1, 1), os.path.join(folder, "alone"), trainer=trainer)
    trainer.register_hooks([hooks.IterationTimer(), Saver(checkpointer) if rank == 0 else None])
    trainer.train(0, 2)
    return trainer.status


def every_rank_goes_on_with_its_own_random_numbers(rank, folder):
    def make():
        trainer, drawn = Steps(step=lambda iter: drawn.append(torch.rand(()).item())), []
        checkpointer = Checkpointer(nn.Linear(1, 1), os.path.join(folder, "random"), trainer=trainer)
        trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 3)])
        return trainer, checkpointer, drawn

    torch.manual_seed(rank)
    trainer, _, whole = make()
    trainer.train(0, 5)
    torch.manual_seed(9)
    trainer, checkpointer, resumed = make()
    checkpointer.load(os.path.join(folder, "random", "model_0000002.pth"))
    trainer.train(3, 5)
    return whole[0], resumed == whole[3:]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    checks = [
        each_rank_gets_its_own_part_and_buffers_back,
        what_ranks_have_in_common_is_in_the_file_once,
        a_file_of_two_ranks_gives_one_process_the_state_of_rank_0,
        a_checkpointer_on_rank_0_alone_waits_for_nobody,
        every_rank_goes_on_with_its_own_random_numbers,
    ]
    folder = tmp_path_factory.mktemp("ranks")
    return on_two_ranks(checks, folder), folder


def test_each_rank_gets_its_own_part_and_its_buffers_back(found):
    # what no key names is that of rank 0, as are the parameters
    assert found[0]["each_rank_gets_its_own_part_and_buffers_back"] == [
        ((rank, float(rank), [1.0] * 3), ([0.0] * 3, [0.0] * 2, [rank + 1.0] * 2)) for rank in range(2)
    ]


def test_what_ranks_have_in_common_is_in_the_file_once(found):
    # "same" once, and "shared", which is that of rank 0 alone
    assert found[0]["what_ranks_have_in_common_is_in_the_file_once"] == [2.0, None]


def test_one_process_takes_the_state_of_rank_0(found):
    part = Part(7)
    Checkpointer(norm(7), found[1] / "for_one", part=part).resume_or_load("")
    assert part.state["own"]["rank"] == 0


def test_a_checkpointer_on_rank_0_alone_saves_without_the_others(found):
    assert found[0]["a_checkpointer_on_rank_0_alone_waits_for_nobody"] == ["finished"] * 2


def test_every_rank_goes_on_with_its_own_random_numbers(found):
    (first, same), (other, also_same) = found[0]["every_rank_goes_on_with_its_own_random_numbers"]
    assert first != other
    assert (same, also_same) == (True, True)


def test_tensors_differ_for_a_digest_by_any_value_their_order_shape_and_dtype():
    one = torch.arange(3_000_001, dtype=torch.float32)  # several pieces
    others = {"equal": one.clone(), "swapped": one.clone(), "sign": one.clone(), "shape": one[:, None]}
    others["swapped"][[5, 2_500_000]] = one[[2_500_000, 5]]
    others["sign"][0] = -0.0
    others["dtype"] = one.view(torch.int32)
    digests = digests_of({"one": one, **others})
    assert [name for name in others if digests[name] == digests["one"]] == ["equal"]
    small = {
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(3),
        "half": torch.ones(3).half(),
    }
    assert len({*digests_of(small).values()}) == 4
