"""A fork goes on from a checkpoint of another run, with settings of its own."""

import json
import shutil

import pytest
import torch
from trainkit.projects.replay import replay
from trainkit.projects.replay.tests import job
from trainkit.projects.replay.tests.job import At, Keep, Killed, digest_of_folder

from tests.two_ranks import on_two_ranks
from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.differences import CLOCK_READINGS, differing, is_of_the_clock
from trainkit.checkpoint.file import read_file
from trainkit.config import ConfigError, get_cfg
from trainkit.engine import DefaultTrainer

pytestmark = pytest.mark.slow  # each test trains and replays in several ways

OWN = ("SOLVER.MAX_ITER", 12, "TEST.EVAL_PERIOD", 4, "HOOKS", [{"NAME": "EMAHook", "DECAY": 0.9}])


def train(folder, *words, **more):
    return job.train(folder, *words, options=OWN, **more)


def fork(parent, folder, *arguments, **more):
    """The script has other settings by now: those of the parent count."""
    options = ("SOLVER.BASE_LR", 7.0, "SOLVER.MOMENTUM", 0.1)
    return job.train(folder, "--fork", parent, *arguments, options=options, **more)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A run of 12 iterations, with checkpoints of iterations 4, 9 and 11."""
    folder = tmp_path_factory.mktemp("parent")
    train(folder)
    return folder


def differences(one, other):
    states = [read_file(folder / "model_final.pth") for folder in (one, other)]
    return [*differing(*states, skip=lambda key, path: is_of_the_clock(path))]


def values(folder):
    """Those of metrics.json without readings of clocks."""
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    rows = [
        {name: value for name, value in line.items() if name not in CLOCK_READINGS}
        for line in lines
    ]
    return [row for row in rows if row.keys() != {"iteration"}]


def test_a_fork_with_the_same_settings_ends_with_the_bits_of_its_parent(tmp_path, parent):
    before = digest_of_folder(parent)
    fork(f"{parent}@5", tmp_path)
    assert differences(tmp_path, parent) == []
    assert values(tmp_path) == [row for row in values(parent) if row["iteration"] >= 4]
    assert digest_of_folder(parent) == before
    assert "WARNING" not in (tmp_path / "log.txt").read_text()


def test_a_fork_that_is_killed_and_resumed_ends_with_the_same_bits(tmp_path, parent):
    change = ("SOLVER.BASE_LR", 0.05, "SEED", 3)
    fork(f"{parent}@5", tmp_path / "whole", *change)

    for kill_at in (7, 11):  # before its first checkpoint, and after it
        with pytest.raises(Killed):
            fork(
                f"{parent}@5",
                tmp_path / "killed",
                *change,
                "--resume",
                hooks=[At(kill_at, Killed())],
            )
    # without the iteration: it is known
    trainer = fork(parent, tmp_path / "killed", *change, "--resume")
    assert trainer.cfg.FORK.ITER == 4
    assert differences(tmp_path / "killed", parent) != []
    assert differences(tmp_path / "killed", tmp_path / "whole") == []
    assert values(tmp_path / "killed") == values(tmp_path / "whole")


def check_fork_of_a_rank(rank, folder):
    train(f"{folder}/parent")
    fork(f"{folder}/parent@5", f"{folder}/fork")
    fork(f"{folder}/parent@5", f"{folder}/other", "SOLVER.BASE_LR", 0.05)


def test_a_fork_on_two_ranks_ends_with_the_bits_of_its_parent(tmp_path):
    assert on_two_ranks([check_fork_of_a_rank], tmp_path) == {"check_fork_of_a_rank": [None, None]}
    assert differences(tmp_path / "fork", tmp_path / "parent") == []
    assert differences(tmp_path / "other", tmp_path / "parent") != []
    parts = read_file(tmp_path / "parent/model_final.pth")["ranks"]
    # the file holds the settings once
    assert all("RunRecord" not in part["trainer"]["hooks"] for part in parts)


def test_rates_of_the_command_win_and_config_and_checkpoint_name_the_parents_and_the_differences(
    tmp_path, parent
):
    trainer = fork(
        f"{parent}@5",
        tmp_path / "b",
        "SOLVER.BASE_LR",
        0.05,
        "SOLVER.MOMENTUM",
        0.5,
        "LOG.PERIOD",
        1,
    )
    fork(tmp_path / "b", tmp_path / "c", "SOLVER.MAX_ITER", 14)

    (group, *_) = trainer.optimizer.param_groups
    assert group["initial_lr"] == 0.05
    assert group["momentum"] == 0.5
    rates, of_parent = (
        {line["iteration"]: line["lr"] for line in values(f) if "lr" in line}
        for f in (tmp_path / "b", parent)
    )
    assert all(
        rates[iter] == pytest.approx(rate / 2) for iter, rate in of_parent.items() if iter > 4
    )
    cfg = get_cfg()
    cfg.merge_from_file(tmp_path / "b/config.yaml")
    changes = [["SOLVER.BASE_LR", 0.1, 0.05], ["SOLVER.MOMENTUM", 0.9, 0.5]]
    assert dict(cfg.FORK) == {"RUN": str(parent), "ITER": 4, "CHANGES": changes}
    assert cfg.LOG.PERIOD == 1
    assert cfg.SOLVER.MAX_ITER == 12
    first = {"run": str(parent), "iteration": 4, "changes": changes}
    second = {"run": str(tmp_path / "b"), "iteration": 11, "changes": [["SOLVER.MAX_ITER", 12, 14]]}
    found = [
        read_file(tmp_path / name / "model_final.pth")["trainer"]["origin"]["parents"]
        for name in ("b", "c")
    ]
    assert found == [[first], [first, second]]


def test_a_seed_of_the_command_gives_the_order_of_a_run_with_that_seed(tmp_path, parent):
    other, forked = Keep(), Keep()
    train(tmp_path / "other", "SEED", 2, hooks=[other])
    fork(f"{parent}@5", tmp_path / "fork", "SEED", 2, hooks=[forked])
    assert sorted(forked.xs) == [5, 6, 7, 8, 9, 10, 11]
    assert all(torch.equal(forked.xs[iter], other.xs[iter]) for iter in forked.xs)
    states = [
        read_file(folder / "model_final.pth")["trainer"] for folder in (parent, tmp_path / "fork")
    ]
    assert not torch.equal(*(state["rng"]["torch"] for state in states))  # of dropout


def test_a_fork_replays_from_its_own_beginning(tmp_path, parent):
    def start():
        return fork(f"{parent}@5", tmp_path, "SOLVER.BASE_LR", 0.05)

    start()

    found = replay(tmp_path, 7, start, prove=True)

    assert found.proof.startswith("every byte equals model_0000009.pth")
    assert found.differences == []
    # the checkpoint of the parent, which the fork has copied, says how
    of_parent = replay(tmp_path, 3, start)
    assert of_parent.on_the_way.startswith("8 of 8 logged values equal those in model_0000004.pth")
    (tmp_path / "model_0000004.pth").unlink()
    with pytest.raises(
        ConfigError, match=f"the run is a fork of {parent}, which has done iterations 0 to 4"
    ):
        replay(tmp_path, 3, start)


def test_what_cannot_be_forked_is_refused(tmp_path, parent, monkeypatch):
    for run, options, message in [
        (
            f"{parent}@6",
            (),
            r"no checkpoint of a DefaultTrainer after 6 iterations; there are those after 5, 10, 12$",
        ),
        (parent, (), "MAX_ITER is 12, but the checkpoint to fork has done 12"),
        (
            f"{parent}@5",
            ("SOLVER.WEIGHT_DECAY_BIAS", 0.5),
            "parent; SOLVER.WEIGHT_DECAY_BIAS would change them",
        ),
        (
            f"{parent}@5",
            ("SOLVER.OPTIMIZER.NAME", "AdamW"),
            "parent; SOLVER.OPTIMIZER.NAME would change them",
        ),
        (
            parent,
            ("OUTPUT_DIR", parent),
            "OUTPUT_DIR or CHECKPOINT.DIR is '.*', the folder of the run to fork",
        ),
        (
            parent,
            ("CHECKPOINT.DIR", parent),
            "OUTPUT_DIR or CHECKPOINT.DIR is '.*', the folder of the run to fork",
        ),
        (
            f"{parent}@5",
            ("--config-file", "a.yaml"),
            "--fork trains with the settings of RUN: without",
        ),
    ]:
        with pytest.raises((ConfigError, CheckpointError), match=message):
            fork(run, tmp_path, *options)
    monkeypatch.setattr(DefaultTrainer, "resume_or_load", lambda self, resume: None)
    with pytest.raises(
        ConfigError, match="--fork is given .*, but the script starts at iteration 0"
    ):
        fork(f"{parent}@5", tmp_path)


def test_a_fork_is_another_run_than_its_parent(tmp_path, parent):
    fork(f"{parent}@5", tmp_path / "fork")
    own, of_parent = (
        {read_file(path)["run_id"] for path in folder.glob("*.pth")}
        for folder in (tmp_path / "fork", parent)
    )
    assert len(own) == 1
    assert len(of_parent) == 1
    assert own != of_parent
    assert {(tmp_path / "fork/run_id").read_text()} == own
    assert {(parent / "run_id").read_text()} == of_parent


def test_a_fork_whose_tag_is_lost_is_resumed_from_its_own_newest_checkpoint(tmp_path, parent):
    fork(f"{parent}@5", tmp_path)
    (tmp_path / "last_checkpoint").unlink()
    again = fork(f"{parent}@5", tmp_path, "SOLVER.MAX_ITER", 14, "--resume")
    assert again.start_iter == 12


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: b""])
@pytest.mark.parametrize("name", ["model_final.pth", "model_0000009.pth"])
def test_a_parent_whose_newest_checkpoint_may_be_damaged_is_forked_only_by_a_number(
    tmp_path, parent, name, damage
):
    copy = tmp_path / "parent"
    shutil.copytree(parent, copy)
    if name != "model_final.pth":
        (copy / "model_final.pth").unlink()
    (copy / "last_checkpoint").write_text(name)
    (copy / name).write_bytes(damage((copy / name).read_bytes()))
    with pytest.raises(CheckpointError, match=f"{name} .* is damaged .*RUN@ITERATIONS; .* after 5"):
        fork(copy, tmp_path / "fork", "SOLVER.MAX_ITER", 14)
    assert fork(f"{copy}@5", tmp_path / "fork", "SOLVER.MAX_ITER", 14).cfg.FORK.ITER == 4
    # a damaged file of an earlier iteration does not matter
    shutil.copy(parent / "model_final.pth", copy)
    if name != "model_final.pth":
        trainer = fork(copy, tmp_path / "other", "SOLVER.MAX_ITER", 14)
        assert trainer.cfg.FORK.ITER == 11
