"""Checkpoints of several processes: all ranks load the same file or fail together, and each gets its own state."""

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from tests.checkpoint.conftest import Counter, linear, weight_of
from tests.engine.tiny import Steps, scalars
from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.ranks import digest_of, take_rank_state
from trainkit.engine import hooks
from trainkit.engine.hook_base import HookBase
from trainkit.utils import comm


def all_ranks_load_the_same_file_or_fail_together(rank, name):
    folder = Path(name) / "together"
    Checkpointer(linear(rank + 1), folder / "run", trainer=Counter()).save("model")  # rank 0 writes
    distributed.barrier()

    # Rank 1 finds no checkpoint in its own folder, but follows rank 0.
    model = linear(0)
    Checkpointer(
        model, folder / ("run" if rank == 0 else "empty"), trainer=Counter()
    ).resume_or_load("")
    assert weight_of(model) == 1
    assert not (folder / "empty").exists()

    # Rank 1 does not see the file: nobody starts at 0, nobody waits.
    path = folder / "run" / "model.pth" if rank == 0 else folder / "elsewhere" / "model.pth"
    with pytest.raises(CheckpointError, match=r"rank 1: cannot read .*elsewhere"):
        Checkpointer(linear(0)).resume_or_load(path, resume=False)

    # An error of rank 0 in choosing the file reaches rank 1; so does that of a disk.
    if rank == 0:
        (folder / "run" / "last_checkpoint").write_text("../model.pth")
    with pytest.raises(CheckpointError, match="bare name"):
        Checkpointer(linear(0), folder / "run").resume_or_load("")
    if rank == 0:
        (folder / "run" / "last_checkpoint").write_text("absent.pth")
        os.listdir, listdir = _fail, os.listdir
    with pytest.raises(CheckpointError, match="Stale file handle"):
        Checkpointer(linear(0), folder / "run").resume_or_load("")
    if rank == 0:
        os.listdir = listdir

    # Rank 0 chooses the newest checkpoint, if no name says which one it is; rank 1 follows.
    if rank == 0:
        (folder / "run" / "last_checkpoint").unlink()
    model = linear(0)
    Checkpointer(
        model, folder / ("run" if rank == 0 else "empty"), trainer=Counter()
    ).resume_or_load("")
    assert weight_of(model) == 1


def _fail(folder):
    raise OSError(errno.ESTALE, "Stale file handle")


class Part:
    """A state of which ``own`` differs between ranks."""

    rank_keys = ("own",)

    def __init__(self, rank, size=3):
        self.state = {
            "own": {
                "rank": rank,
                "list": [torch.tensor([float(rank)])],
                "same": [torch.ones(size), torch.ones(size)],
            },
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
    own, (one, other) = part.state["own"], part.state["own"]["same"]
    one += 1  # equal tensors of one rank are two
    return {
        "rank": own["rank"],
        "list": own["list"][0].item(),
        "one": one.tolist(),
        "other": other.tolist(),
        "shared": part.state["shared"].tolist(),
        "weight": model.weight.tolist(),
        "running_mean": model.running_mean.tolist(),
    }


def ranks_share_in_the_file_what_is_equal(rank, folder):
    sizes = []
    for name, size in (("small", 1), ("large", 100_000)):
        place = os.path.join(folder, name)
        Checkpointer(nn.Linear(1, 1), place, part=Part(rank, size)).save("a")
        if rank == 0:
            sizes.append(os.path.getsize(os.path.join(place, "a.pth")))
    return round((sizes[1] - sizes[0]) / 400_000, 1) if rank == 0 else None


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


class Spoiled(HookBase):
    """Its state on rank 1 can be written only before iteration 4."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        return {"seen": object() if self.rank == 1 and self.trainer.iter >= 4 else 1.5}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]


def a_state_that_one_rank_cannot_write_fails_on_all_ranks_after_the_file_is_written(rank, folder):
    model = linear(3)
    place = Path(folder) / "spoiled"
    trainer = Steps()
    checkpointer = Checkpointer(model, place, trainer=trainer)
    trainer.register_hooks([Spoiled(rank), hooks.PeriodicCheckpointer(checkpointer, 5)])
    with pytest.raises(TypeError, match=r"'trainer.hooks.Spoiled.seen' is .*without this state"):
        trainer.train(0, 20)
    distributed.barrier()
    other = linear(0)
    resumed = Steps()
    hook = Spoiled(0)
    resumed.register_hooks([hook])
    Checkpointer(other, place, trainer=resumed).resume_or_load("")
    return {
        "failed in": trainer.iter,
        "weight": weight_of(other),
        "saved in": resumed.done - 1,
        "seen": getattr(hook, "seen", None),
    }


def every_rank_goes_on_with_its_own_random_numbers_and_the_storage_of_rank_0(rank, folder):
    def make():
        trainer, drawn = Steps(step=lambda iter: drawn.append(torch.rand(()).item())), []
        checkpointer = Checkpointer(
            nn.Linear(1, 1), os.path.join(folder, "random"), trainer=trainer
        )
        put = hooks.CallbackHook(
            after_step=lambda trainer: trainer.storage.put_scalar("rank", rank)
        )
        trainer.register_hooks([put, hooks.PeriodicCheckpointer(checkpointer, 3)])
        return trainer, checkpointer, drawn

    torch.manual_seed(rank)
    trainer, _, whole = make()
    trainer.train(0, 5)
    torch.manual_seed(9)
    trainer, checkpointer, resumed = make()
    checkpointer.load(os.path.join(folder, "random", "model_0000002.pth"))
    trainer.train(3, 5)
    return whole[0], resumed == whole[3:], [value for value, _ in scalars(trainer)["rank"]]


def own_keys_of_a_trainer_are_those_of_the_rank_and_its_attributes_those_of_rank_0(rank, folder):
    class Own(Steps):
        own_keys = (*Steps.own_keys, "data")

        def __init__(self, number):
            super().__init__()
            self.position = {"data": number, "others": number}
            self.part = linear(number)
            self.checkpointer = Checkpointer(
                nn.Linear(1, 1), os.path.join(folder, "of_trainer"), trainer=self
            )

        def state_dict(self):
            return {**super().state_dict(), **self.position}

        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            self.position = {name: state_dict[name] for name in self.position}

    Own(rank + 1).checkpointer.save("a")
    trainer = Own(9)
    trainer.checkpointer.resume_or_load("")
    return {**trainer.position, "weight": weight_of(trainer.part)}


def test_each_rank_goes_on_with_its_own_state_and_all_with_the_same_file(tmp_path, caplog):
    checks = [
        all_ranks_load_the_same_file_or_fail_together,
        each_rank_gets_its_own_part_and_buffers_back,
        ranks_share_in_the_file_what_is_equal,
        a_checkpointer_on_rank_0_alone_waits_for_nobody,
        a_state_that_one_rank_cannot_write_fails_on_all_ranks_after_the_file_is_written,
        every_rank_goes_on_with_its_own_random_numbers_and_the_storage_of_rank_0,
        own_keys_of_a_trainer_are_those_of_the_rank_and_its_attributes_those_of_rank_0,
    ]
    found = on_two_ranks(checks, tmp_path)

    assert found["all_ranks_load_the_same_file_or_fail_together"] == [None, None]
    for rank, own in enumerate(found["each_rank_gets_its_own_part_and_buffers_back"]):
        assert own["rank"] == rank
        assert own["list"] == rank
        assert own["one"] == [2.0] * 3
        assert own["other"] == [1.0] * 3
        # what no key names is that of rank 0, as are the parameters
        assert own["shared"] == [0.0] * 3
        assert own["weight"] == [0.0] * 2
        assert own["running_mean"] == [rank + 1.0] * 2
    # "same" twice, and "shared", which is that of rank 0 alone
    assert found["ranks_share_in_the_file_what_is_equal"] == [3.0, None]
    assert found["a_checkpointer_on_rank_0_alone_waits_for_nobody"] == ["finished"] * 2
    one_fails = found[
        "a_state_that_one_rank_cannot_write_fails_on_all_ranks_after_the_file_is_written"
    ]
    expected = {"failed in": 4, "weight": 3.0, "saved in": 4}
    assert one_fails == [{**expected, "seen": 1.5}, {**expected, "seen": None}]
    (first, same, _), (other, also_same, stored) = found[
        "every_rank_goes_on_with_its_own_random_numbers_and_the_storage_of_rank_0"
    ]
    assert first != other
    assert same is True
    assert also_same is True
    assert stored == [0, 0, 0, 1, 1]

    of_rank_0 = {"others": 1, "weight": 1.0}
    assert found[
        "own_keys_of_a_trainer_are_those_of_the_rank_and_its_attributes_those_of_rank_0"
    ] == [{"data": 1, **of_rank_0}, {"data": 2, **of_rank_0}]

    comm.set_data_ranks(1, 2)
    take_rank_state({}, None, "old.pth")
    [text] = [text for text in caplog.messages if text.startswith("'old.pth'")]
    assert "rank 0" in text
    comm.set_data_ranks()
    part = Part(7)
    # one process takes the state of rank 0
    Checkpointer(norm(7), tmp_path / "own", part=part).resume_or_load("")
    assert part.state["own"]["rank"] == 0


def test_tensors_differ_for_a_digest_by_values_shape_and_dtype():
    one = torch.arange(4, dtype=torch.float32)
    others = [
        one.flip(0),
        one.view(torch.int32),
        one[:, None],
        -one,
        one.half(),
        one.to("meta"),
        one[0],
        one.bool(),
    ]
    assert len({digest_of(tensor) for tensor in [one, *others]}) == 9
    assert digest_of(one) == digest_of(nn.Parameter(one.clone()))
