"""A job with ``MODEL.PARALLEL: fsdp`` on two ranks, and on four, from where it goes on on two and on one."""

import logging
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.multiprocessing import ProcessExitedException
from trainkit.projects.hooks.publish_weights import publish_weights
from trainkit.projects.sharding.format import Shards
from trainkit.projects.sharding.fsdp import shard_model
from trainkit.projects.sharding.tests.sharded_job import (
    assert_close,
    assert_same_bits,
    from_middle_of,
    job,
    outcome,
    train,
    whole,
)

from tests.engine.test_ddp import Net, part
from tests.engine.tiny import scalars
from tests.two_ranks import SLOW, on_two_ranks
from trainkit.checkpoint import CheckpointError
from trainkit.config import get_cfg
from trainkit.engine import DefaultTrainer, HookBase
from trainkit.engine.defaults.run import EvaluationRun
from trainkit.engine.hooks import EMAHook
from trainkit.engine.step import SimpleTrainer
from trainkit.solver import build_optimizer
from trainkit.utils import comm


def from_checkpoint(folder, name, *options, of="whole2", hooks=()):
    return train(job(from_middle_of(folder, of, name), *options), resume=True, hooks=hooks)


def names(folder):
    return sorted(path.name.partition("-")[0] for path in Path(folder).glob("model*"))


# ---------------------------------------------------------------------- on each rank


def in_one_piece(rank, folder):
    """From weights that each rank has drawn for itself."""
    trainer = train(job(f"{folder}/whole{comm.get_world_size()}"))
    return {**outcome(trainer), "share": share_of(trainer.model)}


def share_of(model):
    parameters = [*model.parameters()]
    return sum(part.to_local().numel() for part in parameters) / sum(
        part.numel() for part in parameters
    )


def resumed(rank, folder):
    return outcome(from_checkpoint(folder, "resumed"))


MESH = ["MODEL.FSDP.MESH", [2, 2]]


def on_a_mesh(rank, folder):
    """Two groups of two ranks: each rank holds a half. One piece, and resumed."""
    trainer = train(job(f"{folder}/mesh", *MESH))
    resumed = from_checkpoint(folder, "mesh_resumed", *MESH, of="mesh")
    copied, shards = [], Shards()
    for name, parameter in trainer.model.named_parameters():
        shards.take(parameter, name, lambda part, path: copied.append(path) or part)
    return {
        **outcome(trainer),
        "share": share_of(trainer.model),
        "resumed": outcome(resumed),
        "copied": copied,
    }


def saved_asynchronously(rank, folder):
    """In two parts, the second of which starts with the save of the first."""
    cfg = job(f"{folder}/asynchronously", "CHECKPOINT.ASYNC", True)
    train(cfg, until=5)
    return outcome(train(cfg, resume=True))


class OnMeta(DefaultTrainer):
    @classmethod
    def build_model(cls, cfg):
        model = super().build_model(cfg)
        assert next(model.parameters()).is_meta == (comm.get_rank() > 0)
        return model


def from_the_meta_device(rank, folder):
    """The other ranks never have a whole weight; ``scale`` is computed by the constructor, and no part of a state."""
    return outcome(train(job(f"{folder}/meta", "MODEL.FSDP.META_INIT", True), trainer_type=OnMeta))


def with_amp(rank, folder):
    """float16 with a gradient scaler that starts far too high, so that the first updates are skipped."""
    found = scalars(
        train(job(f"{folder}/amp", "SOLVER.AMP.ENABLED", True, "SOLVER.AMP.INIT_SCALE", 2.0**20))
    )
    return [found[name] for name in ("skipped_updates", "[metric]grad_scaler", "total_loss")]


def evaluated_alone(rank, folder):
    """What ``--eval-only`` does, from the shards, with the average."""
    return EvaluationRun(job(f"{folder}/whole2"), DefaultTrainer).run()


def stopped_on_one_rank(rank, folder):
    """Rank 1 is asked to stop inside an evaluation; every forward pass is one of all ranks together."""

    class StopInside(HookBase):
        def after_eval_step(self, phase, index, inputs, outputs):
            if comm.get_rank() == 1 and index == 1:
                self.trainer.request_stop("enough")

    trainer = from_checkpoint(folder, "stopped", hooks=[StopInside()])
    return trainer.status, trainer.iter


def damaged(rank, folder):
    """The newest checkpoint has another byte in one shard: the one before goes on; then that is not there either."""
    path = Path(folder, "damaged")
    if rank == 0:
        shutil.copytree(f"{folder}/whole2/", path)
        (shard,) = path.glob("model_final.shards-*/__1_0.distcp")
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    comm.synchronize()
    trainer = DefaultTrainer(job(path))
    trainer.resume_or_load(resume=True)
    comm.synchronize()
    (path / "model_0000004.pth").unlink(missing_ok=True)
    comm.synchronize()
    with pytest.raises(CheckpointError):
        DefaultTrainer(job(path)).resume_or_load(resume=True)
    return trainer.start_iter


def unwritable_in_the_thread(rank, folder):
    return unwritable(rank, folder, "CHECKPOINT.ASYNC", True)


def unwritable(rank, folder, *options):
    """Rank 1 cannot write its part of the first checkpoint; the run goes on, and writes the second one."""
    write, failed, lines, handler = FileSystemWriter.write_data, [], [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())

    def fail_once(*args):
        if rank == 1 and not failed:
            failed.append(True)
            raise OSError(28, "No space left on device")
        return write(*args)

    logging.getLogger("trainkit").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", fail_once)
        train(job(f"{folder}/unwritable{len(options)}", *options))
    logging.getLogger("trainkit").removeHandler(handler)
    return names(f"{folder}/unwritable{len(options)}"), [
        line for line in lines if "is not saved" in line
    ]


def rotated(rank, folder):
    options = [
        "SOLVER.CHECKPOINT_PERIOD",
        2,
        "CHECKPOINT.MAX_TO_KEEP",
        1,
        "CHECKPOINT.SAVE_LAST",
        False,
    ]
    train(job(f"{folder}/rotated", *options))
    comm.synchronize()
    return names(f"{folder}/rotated")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(x)).square().mean()


def tied(rank, folder):
    """The average, under both names of the parameter."""
    model, hook = Tied(), EMAHook(0.5)
    shard_model(model)
    trainer = SimpleTrainer(model, [torch.ones(1, 2)], torch.optim.SGD(model.parameters(), 0.1))
    trainer.register_hooks([hook])
    trainer.train(0, 3)
    return {name: whole(value) for name, value in hook.state_dict()["model"].items()}


def six_steps(name, rank=0, num_ranks=1):
    """Each of two micro-batches."""
    model, cfg = Net(seed=rank), get_cfg()
    cfg.merge_from_list(["SOLVER.BASE_LR", 0.01, "SOLVER.OPTIMIZER.NAME", name])
    if num_ranks > 1:
        shard_model(model, model.layers)
    optimizer = build_optimizer(cfg, model)
    SimpleTrainer(model, part(rank, num_ranks, 2), optimizer, accumulation_steps=2).train(0, 6)
    return [whole(parameter.detach()) for parameter in model.parameters()]


OPTIMIZERS = ["SGD", "AdamW", "Adagrad", "LARS"]


def optimizers(rank, folder):
    return {name: six_steps(name, rank, 2) for name in OPTIMIZERS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module", params=SLOW)
def four(folder):
    return on_two_ranks([in_one_piece, on_a_mesh], folder, num_ranks=4)


@pytest.fixture(scope="module", params=SLOW)
def two(four, folder):
    checks = [
        in_one_piece,
        resumed,
        saved_asynchronously,
        from_the_meta_device,
        with_amp,
        evaluated_alone,
    ]
    checks += [
        stopped_on_one_rank,
        damaged,
        unwritable,
        unwritable_in_the_thread,
        rotated,
        optimizers,
    ]
    return on_two_ranks([*checks, tied], folder)


def test_each_rank_holds_a_part_and_the_ranks_agree(four, two):
    found = four["in_one_piece"]
    assert sum(rank["share"] for rank in found) == pytest.approx(1)
    assert max(rank["share"] for rank in found) < 0.4
    for rank in found[1:]:
        assert rank["losses"] == found[0]["losses"]
        torch.testing.assert_close(rank["weights"], found[0]["weights"], atol=0, rtol=0)
    assert_close(two["in_one_piece"][0], found[0])


@pytest.mark.parametrize("way", ["resumed", "saved_asynchronously", "from_the_meta_device"])
def test_the_run_is_the_same_to_the_last_bit(two, way):
    for found, expected in zip(two[way], two["in_one_piece"], strict=True):
        assert_same_bits(found, expected)


def test_groups_of_ranks_shard_the_model_each_and_resume_exactly(four):
    for rank, expected in zip(four["on_a_mesh"], four["in_one_piece"], strict=True):
        assert_close(rank, expected)
        assert_same_bits(rank["resumed"], rank)
    assert sum(rank["share"] for rank in four["on_a_mesh"]) == pytest.approx(2)
    assert max(rank["share"] for rank in four["on_a_mesh"]) < 0.6
    copied = Counter(name for rank in four["on_a_mesh"] for name in rank["copied"])
    assert {*copied.values()} == {2}  # of the two ranks with the same part, one copies it
    assert all(0 < len(rank["copied"]) < len(copied) for rank in four["on_a_mesh"])


def test_it_goes_on_in_one_process_with_the_same_losses(four, folder):
    trainer = from_checkpoint(folder, "by_one", of="whole4")
    assert [iter for _, iter in scalars(trainer)["total_loss"]] == [*range(10)]
    assert_close(outcome(trainer), four["in_one_piece"][0])


def test_a_scaler_skips_the_same_updates_on_all_ranks(two):
    found, other = two["with_amp"]
    skipped = [int(number) for number, _ in found[0]]  # so far
    assert skipped[0] == 1
    assert skipped[-1] < 8
    assert [scale for scale, _ in found[1]] == [
        2.0 ** (20 - before) for before in [0, *skipped[:-1]]
    ]
    assert found == other


def test_an_evaluation_alone_has_the_results_of_the_run(four, two):
    results, expected = two["evaluated_alone"][0], two["in_one_piece"][0]["results"]
    for prefix, found in (("", results), ("raw/", results["raw"])):
        assert expected[f"{prefix}classification/top1"][-1][0] == found["classification"]["top1"]


def test_a_stop_inside_an_evaluation_ends_it_on_all_ranks_at_once(two):
    assert two["stopped_on_one_rank"] == [("stopped", 5)] * 2


def test_a_damaged_shard_sends_all_ranks_to_the_checkpoint_before(two):
    assert two["damaged"] == [5] * 2


@pytest.mark.parametrize("way", ["unwritable", "unwritable_in_the_thread"])
def test_a_rank_that_cannot_write_its_part_is_named_on_all_and_training_goes_on(two, way):
    for files, lines in two[way]:
        assert files == ["model_final.pth", "model_final.shards"]
        assert ["rank 1: [Errno 28] No space left on device" in line for line in lines] == [True]


def test_shards_are_rotated_with_their_checkpoint(two):
    assert two["rotated"][0] == ["model_0000009.pth", "model_0000009.shards"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_update_shards_as_they_update_whole_parameters(two, name):
    expected = six_steps(name)
    for found in two["optimizers"]:
        torch.testing.assert_close(found[name], expected, atol=1e-6, rtol=1e-6)


def test_what_modules_share_has_one_average(two):
    for average in two["tied"]:
        assert list(average) == ["one.weight", "two.weight"]
        assert torch.equal(average["one.weight"], average["two.weight"])


@pytest.mark.parametrize("weights", ["model", "ema"])
def test_published_weights_are_one_plain_file(four, folder, weights):
    path = publish_weights(
        shutil.copytree(folder / "whole4", folder / weights) / "model_final.pth", weights
    )
    found = torch.load(path, weights_only=True)["model"]
    expected = four["in_one_piece"][0]["weights" if weights == "model" else "average"]
    assert list(found) == list(expected)
    torch.testing.assert_close(dict(found), expected, atol=0, rtol=0)


# ---------------------------------------------------------------------- a save that is killed


def killed_while_saving(rank, folder):
    """At the last iteration, after each rank has written its part; ``last_checkpoint`` names that of iteration 5."""

    def die(*args, **kwargs):
        os._exit(9)

    FileSystemWriter.finish = die  # on rank 0, which writes what says where the parts are
    from_checkpoint(folder, "killed")


def resumed_after_it(rank, folder):
    before = sorted(p.name for p in Path(folder, "killed").glob("model_final*"))
    comm.synchronize()
    trainer = train(job(f"{folder}/killed"), resume=True)
    return {**outcome(trainer), "started": trainer.start_iter, "before": before}


def test_a_save_that_is_killed_leaves_the_one_before_in_use(two, folder):
    with pytest.raises(ProcessExitedException):
        on_two_ranks([killed_while_saving], folder)
    found = on_two_ranks([resumed_after_it], folder)["resumed_after_it"]
    for rank in found:
        assert rank["started"] == 5
        assert len([name for name in rank["before"] if name.startswith("model_final.shards")]) == 1
        assert_close(rank, two["in_one_piece"][0])
    assert len([*(folder / "killed").glob("model_final*")]) == 2
