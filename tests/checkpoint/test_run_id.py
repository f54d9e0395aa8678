"""Checkpoints of one run, told from those of another by the identity that a run writes."""

import logging
import os
import shutil
import signal

import pytest
import torch

from tests.checkpoint.conftest import Counter, linear, resumed, weight_of
from tests.checkpoint.faults import Faults
from tests.engine.job import tiny_cfg
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.file import write_file
from trainkit.engine import DefaultTrainer, default_setup
from trainkit.utils.logger import close_logger

FILES = ("model_0000009.pth", "model_0000019.pth", "model_0000029.pth")


def warnings_of(caplog):
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


def save(folder, iteration, **options):
    checkpointer = Checkpointer(linear(iteration), folder, trainer=Counter(iteration))
    checkpointer.save(f"model_{iteration:07d}", iteration=iteration, **options)


def id_in(path):
    return torch.load(path, weights_only=True).get("run_id")


def id_of(folder):
    """That of the folder and of all its checkpoints."""
    (run_id,) = {id_in(path) for path in folder.glob("*.pth")}
    assert (folder / "run_id").read_text() == run_id
    return run_id


@pytest.fixture
def other_run(tmp_path_factory):
    """A folder with checkpoints of iterations 24, 39 of another run."""
    folder = tmp_path_factory.mktemp("other")
    for iteration in (24, 39):
        save(folder, iteration)
    return folder


@pytest.fixture
def oldest_is_newest(run_folder):
    """The times of the files say the opposite of their iterations."""
    for age, name in enumerate(FILES):
        os.utime(run_folder / name, (10_000 - age, 10_000 - age))


@pytest.mark.parametrize("tag", [None, "\n"])
def test_without_a_tag_the_last_iteration_is_resumed_with_a_warning(
    run_folder, oldest_is_newest, caplog, tag
):
    (run_folder / "last_checkpoint").unlink()
    if tag is not None:
        (run_folder / "last_checkpoint").write_text(tag)
    checkpointer = Checkpointer(linear(0), run_folder)
    assert checkpointer.get_checkpoint_file() == str(run_folder / FILES[2])
    assert checkpointer.has_checkpoint()
    assert warnings_of(caplog) == []
    assert resumed(run_folder) == 29
    [text] = warnings_of(caplog)
    assert f"'{run_folder}' has no last_checkpoint" in text
    assert text.endswith(f"'{FILES[2]}'")


def test_if_the_newest_is_damaged_the_one_with_the_last_iteration_before_is_next(
    run_folder, oldest_is_newest, caplog
):
    for iteration, name in ((29, FILES[2]), (19, FILES[1]), (9, FILES[0])):
        assert resumed(run_folder) == iteration
        (run_folder / name).write_bytes(b"PK damaged")
    assert f"Resuming from '{run_folder / FILES[1]}' instead" in warnings_of(caplog)[0]


@pytest.mark.parametrize("damage", [b"", "flipped"])
def test_later_files_that_the_user_has_left_behind_are_not_used_before_earlier_ones(
    run_folder, damage
):
    """The user has gone back to iteration 9, and trained to 19 again."""
    path = run_folder / FILES[1]
    (run_folder / "last_checkpoint").write_text(path.name)
    bits = torch.tensor(19.0).numpy().tobytes()
    path.write_bytes(path.read_bytes().replace(bits, bytes(4)) if damage == "flipped" else damage)
    assert resumed(run_folder) == 9
    (run_folder / FILES[0]).unlink()
    assert resumed(run_folder) == 29


def test_of_one_iteration_the_final_file_is_the_newest(run_folder):
    for name in ("model_best", "model_final"):
        Checkpointer(linear(29), run_folder, trainer=Counter(29)).save(
            name, tag_last=False, iteration=29
        )
    (run_folder / "last_checkpoint").unlink()
    newest = Checkpointer(linear(0), run_folder).get_checkpoint_file()
    assert newest == str(run_folder / "model_final.pth")


@pytest.mark.parametrize("name", ["model_0000039.pth", "model_0000024.pth"])
@pytest.mark.parametrize("has_tag", [True, False])
def test_a_copied_checkpoint_of_another_run_is_not_used(
    run_folder, other_run, caplog, name, has_tag
):
    shutil.copy(other_run / name, run_folder)
    (run_folder / FILES[2]).write_bytes(b"PK damaged")
    if not has_tag:
        (run_folder / "last_checkpoint").unlink()
    assert resumed(run_folder) == 19
    [text] = [text for text in warnings_of(caplog) if "of another run" in text]
    assert f"'{run_folder}'" in text
    assert text.endswith(f": '{name}'")
    for own in FILES:
        (run_folder / own).unlink()
    if has_tag:
        with pytest.raises(CheckpointError, match="no checkpoint is intact"):
            resumed(run_folder)
    else:
        assert resumed(run_folder) == 0
        assert f"of another run, not used: '{name}'" in warnings_of(caplog)[0]


def test_a_tag_that_names_a_file_of_another_run_is_an_error_with_two_remedies(
    run_folder, other_run
):
    shutil.copy(other_run / "model_0000039.pth", run_folder)
    tag = run_folder / "last_checkpoint"
    tag.write_text("model_0000039.pth")
    text = (
        r"names 'model_0000039.pth', a file of another run. Name a file .* delete the file run_id"
    )
    for find in (resumed, lambda folder: Checkpointer(linear(0), folder).has_checkpoint()):
        with pytest.raises(CheckpointError, match=text):
            find(run_folder)
    tag.write_text(FILES[1])
    assert resumed(run_folder) == 19
    tag.write_text("model_0000039.pth")
    (run_folder / "run_id").unlink()
    assert resumed(run_folder) == 39


def test_a_folder_without_identity_takes_over_that_of_the_file_that_is_resumed(
    run_folder, other_run, tmp_path_factory
):
    """Such as a copy of some of the files."""
    former = id_of(run_folder)
    copy = tmp_path_factory.mktemp("copy")
    for name in (FILES[1], "last_checkpoint"):
        shutil.copy(run_folder / name, copy)
    (copy / "last_checkpoint").write_text(FILES[1])
    checkpointer = Checkpointer(linear(0), copy, trainer=Counter())
    checkpointer.resume_or_load("")
    assert not (copy / "run_id").exists()  # a resume writes nothing
    checkpointer.save("model_0000024", iteration=24)
    assert id_of(copy) == former != id_of(other_run)


def test_without_tag_and_identity_files_of_several_runs_are_an_error(run_folder, other_run):
    shutil.copy(other_run / "model_0000024.pth", run_folder)
    (run_folder / "last_checkpoint").unlink()
    assert resumed(run_folder) == 29
    (run_folder / "run_id").unlink()
    with pytest.raises(
        CheckpointError, match=r"several runs: 'model_0000009.pth', .*'model_0000024"
    ):
        resumed(run_folder)
    (run_folder / "last_checkpoint").write_text(FILES[0])
    assert resumed(run_folder) == 9


def test_files_without_identity_as_of_detectron2_are_resumed_and_their_run_gets_one(tmp_path):
    for iteration in (9, 19):
        state = {"model": linear(iteration).state_dict(), "trainer": {"value": iteration}}
        write_file({**state, "iteration": iteration}, tmp_path / f"model_{iteration:07d}.pth")
    (tmp_path / "last_checkpoint").write_text("model_0000009.pth")
    assert resumed(tmp_path) == 9
    (tmp_path / "last_checkpoint").unlink()
    assert resumed(tmp_path) == 19
    checkpointer = Checkpointer(linear(29), tmp_path, trainer=Counter(29))
    checkpointer.resume_or_load("")
    checkpointer.save("model_0000029", iteration=29)
    assert id_in(tmp_path / "model_0000029.pth") == (tmp_path / "run_id").read_text() != ""
    (tmp_path / "last_checkpoint").write_text("model_0000009.pth")  # the user goes back
    assert resumed(tmp_path) == 9


def test_a_new_run_in_a_used_folder_has_another_identity_wherever_its_first_save_is_killed(
    run_folder, tmp_path_factory, caplog
):
    def first_save(folder, faults=()):
        model = linear(4)
        checkpointer = Checkpointer(model, folder, trainer=Counter(4))
        checkpointer.resume_or_load("", resume=False)
        if faults:
            Faults(setattr, *faults, lambda: os.kill(os.getpid(), signal.SIGKILL))
        checkpointer.save("model_0000004", iteration=4)

    found = []
    for kind in ("write", "fsync", "rename"):
        for n in (1, 2, 3):
            folder = tmp_path_factory.mktemp("run")
            shutil.copytree(run_folder, folder, dirs_exist_ok=True)
            child = os.fork()
            if child == 0:
                try:
                    first_save(folder, (kind, n))
                finally:
                    os._exit(0)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
            found.append(resumed(folder))
    assert {*found} == {29, 4}

    former = id_of(run_folder)
    first_save(run_folder)
    new = id_in(run_folder / "model_0000004.pth")
    assert (run_folder / "run_id").read_text() == new != former
    caplog.clear()
    (run_folder / "model_0000004.pth").write_bytes(b"PK damaged")
    with pytest.raises(CheckpointError, match="no checkpoint is intact"):
        resumed(run_folder)
    assert FILES[2] in warnings_of(caplog)[0]


def test_weights_of_another_run_are_loaded_and_leave_the_run_its_identity(run_folder, other_run):
    model = linear(0)
    checkpointer = Checkpointer(model, run_folder, trainer=Counter(49))
    checkpointer.resume_or_load("")
    assert checkpointer.load(other_run / "model_0000039.pth", []) == {
        "iteration": 39,
        "trainer": {"value": 39},
    }
    assert weight_of(model) == 39
    checkpointer.save("model_0000049", iteration=49)
    assert id_of(run_folder) != id_of(other_run)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"x" * 1000])
def test_an_entry_and_a_file_of_any_content_are_compared_and_not_shown(run_folder, content, caplog):
    (run_folder / "run_id").write_bytes(content)
    state = torch.load(run_folder / FILES[2], weights_only=True)
    for value in ("\x1b[31m" * 1000, 7, [1], None):
        write_file({**state, "run_id": value}, run_folder / FILES[2])
        if isinstance(value, str) and content:
            with pytest.raises(CheckpointError, match="a file of another run") as caught:
                resumed(run_folder)
            assert "\x1b" not in str(caught.value)
        else:
            assert resumed(run_folder) == 29


def test_a_link_to_a_file_elsewhere_is_neither_read_nor_written(run_folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "run_id"
    elsewhere.write_text("another run")
    (run_folder / "run_id").unlink()
    (run_folder / "run_id").symlink_to(elsewhere)
    assert resumed(run_folder) == 29
    assert elsewhere.read_text() == "another run"


def start(folder, resume, max_iter=4):
    lengths = ("SOLVER.CHECKPOINT_PERIOD", 2, "SOLVER.MAX_ITER", max_iter)
    cfg = tiny_cfg(folder, *lengths, "LOG.WRITERS", [])
    args = type("Args", (), {"resume": resume})
    default_setup(cfg, args)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.train()
    close_logger()
    return trainer


def test_a_run_has_one_identity_and_is_resumed_without_its_tag_and_a_new_one_has_another(tmp_path):
    start(tmp_path, resume=False)
    first = id_of(tmp_path)
    (tmp_path / "last_checkpoint").unlink()
    assert start(tmp_path, resume=True, max_iter=6).start_iter == 4
    assert id_of(tmp_path) == first
    assert "has no last_checkpoint; resuming from its newest" in (tmp_path / "log.txt").read_text()
    assert [*tmp_path.glob("previous_*")] == []
    start(tmp_path, resume=False)
    second = id_of(tmp_path)
    assert id_of(tmp_path / "previous_1") == first != second
    # a trainer that starts over in this process, too
    start(tmp_path, resume=False).train(0, 2)
    assert len({first, second, id_of(tmp_path), id_of(tmp_path / "previous_3")}) == 4
