"""Whatever is broken is found, named and passed over."""

import builtins
import logging
import os
import random

import pytest

from tests.checkpoint.conftest import Counter, linear, weight_of
from trainkit.checkpoint import Checkpointer, CheckpointError

NEWEST = "model_0000029.pth"


def resume(folder):
    model, trainer = linear(0), Counter()
    Checkpointer(model, folder, trainer=trainer).resume_or_load("", resume=True)
    assert trainer.value == weight_of(model)
    return trainer.value


def warnings_of(caplog):
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


def flips(intact, rng):
    for position in rng.sample(range(len(intact)), 200):
        damaged = bytearray(intact)
        damaged[position] ^= rng.randrange(1, 256)
        yield bytes(damaged)


def truncations(intact, rng):
    return (intact[:length] for length in rng.sample(range(len(intact)), 200))


@pytest.mark.parametrize(("damages", "most_harmless"), [(flips, 100), (truncations, 0)])
@pytest.mark.parametrize("tagged", [True, False])
def test_after_each_of_200_damages_the_run_goes_on_from_the_checkpoint_before(
    run_folder, caplog, damages, most_harmless, tagged
):
    """Or from the damaged one, if what it holds is the same: an archive has padding."""
    path = run_folder / NEWEST
    intact = path.read_bytes()
    if not tagged:
        (run_folder / "last_checkpoint").unlink()
    assert (resume(run_folder), warnings_of(caplog)) == (29, [])

    num_harmless = 0
    for damaged in damages(intact, random.Random(4)):
        path.write_bytes(damaged)
        if resume(run_folder) == 29:
            num_harmless += 1
            assert warnings_of(caplog) == []
            continue
        (warning,) = warnings_of(caplog)
        assert str(path) in warning
        assert f"Resuming from '{run_folder / 'model_0000019.pth'}' instead" in warning
    assert num_harmless <= most_harmless


def test_a_resume_reads_each_file_that_it_tries_once(run_folder, monkeypatch):
    opened, open_file = [], builtins.open

    def noted(file, *args, **kwargs):
        opened.append(os.path.basename(file))
        return open_file(file, *args, **kwargs)

    def files_of_a_resume():
        opened.clear()
        checkpointer = Checkpointer(linear(0), run_folder, trainer=Counter())
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "open", noted)
            checkpointer.resume_or_load("", resume=True)
        return list(opened)

    before = "model_0000019.pth"
    assert files_of_a_resume() == ["last_checkpoint", NEWEST]
    (run_folder / NEWEST).write_bytes(b"damaged")
    assert files_of_a_resume() == ["last_checkpoint", NEWEST, before]


def directory(path):
    path.mkdir()


def dangling(path):
    path.symlink_to(path.parent / "nowhere.pth")


def circle(path):
    path.symlink_to(path)


@pytest.mark.parametrize("make", [directory, dangling, circle, lambda path: path.touch()])
@pytest.mark.parametrize("tagged", [True, False])
def test_what_is_no_file_is_passed_over(run_folder, caplog, make, tagged):
    make(run_folder / "model_0000039.pth")
    if tagged:
        (run_folder / "last_checkpoint").write_text("model_0000039.pth")
    else:
        (run_folder / "last_checkpoint").unlink()

    checkpointer = Checkpointer(linear(0), run_folder)
    assert checkpointer.get_checkpoint_file() == str(run_folder / ("model_0000039.pth" if tagged else NEWEST))
    assert resume(run_folder) == 29
    is_listed = make not in (dangling, circle)  # a link to nothing has no time of writing
    assert len(warnings_of(caplog)) == (tagged or is_listed)


def test_a_folder_in_place_of_the_tag_is_an_error(run_folder):
    (run_folder / "last_checkpoint").unlink()
    (run_folder / "last_checkpoint").mkdir()
    with pytest.raises(CheckpointError, match="cannot read .*last_checkpoint"):
        resume(run_folder)


def test_a_resume_removes_what_a_killed_save_has_left_and_nothing_else(run_folder):
    leftover, mine = ".model_0000039.pth.0123abcd.trainkit-tmp", ".model_0000039.pth.mine"
    for name in (leftover, mine):
        (run_folder / name).touch()
    Checkpointer(linear(0), run_folder, save_to_disk=False, trainer=Counter()).resume_or_load("")
    assert {leftover, mine} <= set(os.listdir(run_folder))  # it does not write here; another process may

    assert resume(run_folder) == 29
    assert [name for name in os.listdir(run_folder) if name.startswith(".")] == [mine]
