"""The assertions find each planted fault, say its cause, and pass sound jobs."""

import shutil
import subprocess
import sys
from functools import partial

import pytest
from torch import nn

from tests.engine.job import tiny_cfg
from tests.testing import jobs
from trainkit.engine import DefaultTrainer
from trainkit.testing import assert_resumes_exactly, assert_same_on_any_workers
from trainkit.testing.record import Keeper, copy_folder

resumes_here = partial(assert_resumes_exactly, max_iter=13, new_processes=False)


def message_of(make_trainer, folder, **options):
    with pytest.raises(AssertionError) as caught:
        resumes_here(make_trainer, folder, **options)
    return str(caught.value)


def first_lines(text):
    """The kinds of differences, and the cause."""
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


def test_a_sound_job_resumes_exactly_wherever_it_is_killed(tmp_path):
    resumes_here(jobs.trainer, tmp_path, kills=12)


def configured(folder):
    trainer = DefaultTrainer(tiny_cfg(folder, "SOLVER.CHECKPOINT_PERIOD", 3))
    trainer.resume_or_load()
    return trainer


def test_the_config_of_a_default_trainer_has_the_length(tmp_path):
    assert_resumes_exactly(configured, tmp_path, 1, new_processes=False)
    assert (tmp_path / "whole/model_final.pth").exists()
    assert len([*tmp_path.glob("resumed_*/model_final.pth")]) == 1


def test_a_generator_of_the_dataset_that_is_not_saved_is_found(tmp_path):
    found = first_lines(message_of(jobs.own_generator, tmp_path))
    assert found["first call that differs"].startswith("after_step of iteration ")
    assert found["first call that differs"].endswith(": the batch")
    assert "total_loss: " in found["first line of metrics that differs"]
    assert ".pth: model/layers.0.weight: " in found["first entry of a checkpoint that differs"]
    assert "a random generator of the dataset's own" in found["likely cause"]


def test_a_loader_without_a_state_is_found(tmp_path):
    cause = first_lines(message_of(jobs.plain_loader, tmp_path))["likely cause"]
    assert "the data loader (DataLoader) has no state_dict()" in cause


def test_an_optimizer_in_a_private_attribute_is_found(tmp_path):
    found = first_lines(message_of(jobs.hidden_optimizer, tmp_path))
    assert ": the losses: total_loss " in found["first call that differs"]
    assert found["likely cause"].endswith("not saved: _second")


def test_a_hook_with_a_counter_and_no_state_is_found(tmp_path):
    found = first_lines(message_of(jobs.forgetful, tmp_path))
    assert "first call that differs" not in found
    assert ": count: " in found["first line of metrics that differs"]
    cause = found["likely cause"]
    assert cause.startswith("Forgetful does not save its attribute 'count' (")
    assert cause.endswith("): return it from state_dict()")
    assert "before_train" not in cause
    assert "newest" not in cause


def test_a_number_that_is_drawn_in_before_train_is_found(tmp_path):
    cause = first_lines(message_of(jobs.drawn_at_start, tmp_path))["likely cause"]
    assert cause.startswith("DrawnAtStart does not save its attribute 'scale' (0.")
    assert "a draw in before_train, which a resumed run calls again" in cause


def test_a_number_that_a_constructor_draws_is_found(tmp_path):
    cause = first_lines(message_of(jobs.drawn_when_made, tmp_path))["likely cause"]
    assert cause.startswith("DrawnWhenMade does not save its attribute 'scale' (0.")
    assert "before_train" not in cause


def test_a_draw_that_only_one_of_the_runs_makes_is_found_with_its_place(tmp_path):
    text = message_of(jobs.draws_once, tmp_path, kills=1)
    found = first_lines(text)
    assert found["first call that differs"].endswith("after all other hooks: the random numbers")
    assert "in the before_step of a hook in iteration " in found["likely cause"]


def test_a_resumed_run_that_makes_more_calls_is_found(tmp_path):
    found = first_lines(message_of(jobs.ends_early, tmp_path))
    call, _, other = found["first call that differs"].partition("; and ")
    assert call.startswith("after_train")
    assert "iteration 10, before all other hooks" in call
    assert other.startswith("before_epoch")
    assert "iteration 10, before all other hooks" in other
    assert found["likely cause"].startswith("EndsEarly does not save its attribute 'steps' (")


def kept(folder, kills, seed=0):
    """The numbers of the calls at which a run was killed."""
    resumes_here(jobs.trainer, folder, kills, seed=seed, max_iter=5)
    return sorted(int(path.name.removeprefix("resumed_")) for path in folder.glob("resumed_*"))


def test_the_moments_are_drawn_by_the_seed_or_are_all(tmp_path):
    drawn = kept(tmp_path / "a", 4)
    other = kept(tmp_path / "b", 4, seed=1)
    assert len(drawn) == len(other) == 4
    assert drawn != other
    everywhere = kept(tmp_path / "c", None)
    assert everywhere == [*range(everywhere[0], everywhere[-1] + 1)]
    assert {*drawn, *other} <= {*everywhere}


def test_each_moment_is_as_likely_as_any_other(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    counts = dict.fromkeys(range(3, 10), 0)
    for seed in range(300):
        copies = tmp_path / str(seed)
        keeper = Keeper(run, copies, 2, seed)
        (run / "last_checkpoint").unlink(missing_ok=True)
        for call in range(10):
            if call == 3:
                (run / "last_checkpoint").touch()
            assert keeper.see(call) == (call >= 3)
        for copy in copies.iterdir():
            counts[int(copy.name)] += 1
    assert sum(counts.values()) == 600
    # each has 300 * 2 / 7 = 86 on average, with a standard deviation of 8
    assert all(50 < count < 122 for count in counts.values())


def test_a_copy_names_no_checkpoint_that_was_not_copied(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "inner").mkdir(parents=True)
    for name in ("a.pth", "run.lock", "inner/b.pth", "inner/last_checkpoint"):
        (run / name).write_text(name)
    copied = []
    copy = shutil.copy
    monkeypatch.setattr("shutil.copy", lambda file, to: [copied.append(file.name), copy(file, to)])
    copy_folder(run, tmp_path / "copy")
    assert copied[0] == "last_checkpoint"
    assert sorted(copied[1:]) == ["a.pth", "b.pth"]
    assert (tmp_path / "copy/inner/b.pth").read_text() == "inner/b.pth"


def test_a_metric_that_differs_between_equal_runs_can_be_left_out(tmp_path):
    text = message_of(jobs.unreproducible, tmp_path / "a")
    assert "entropy" in first_lines(text)["first line of metrics that differs"]
    resumes_here(jobs.unreproducible, tmp_path / "b", ignore=["entropy"])


def test_a_job_that_does_not_load_its_checkpoint_is_told_so(tmp_path):
    text = message_of(jobs.without_load, tmp_path)
    assert "the resumed run starts anew" in text
    assert "make_trainer must load" in text


def make_model(folder):
    return nn.Linear(1, 1)


def closure():
    number = 3
    return lambda folder: jobs.trainer(folder, period=number)


@pytest.mark.parametrize(
    ("make_trainer", "options", "error", "text"),
    [
        (lambda folder: jobs.trainer(folder), {}, ValueError, "a function at the top of a module"),
        (closure(), {}, ValueError, "a function at the top of a module"),
        (partial(closure()), {}, ValueError, "a function at the top of a module"),
        (make_model, {"new_processes": False}, TypeError, "must return a trainer, got Linear"),
        (jobs.trainer, {"new_processes": False}, ValueError, "max_iter must be given"),
        (
            partial(jobs.trainer, period=100),
            {"new_processes": False, "max_iter": 13},
            ValueError,
            "no checkpoint before its last iteration",
        ),
    ],
)
def test_what_cannot_be_checked_is_refused(tmp_path, make_trainer, options, error, text):
    with pytest.raises(error, match=text) as caught:
        assert_resumes_exactly(make_trainer, tmp_path, **options)
    assert "\n" not in str(caught.value)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="folder must be empty"):
        resumes_here(jobs.trainer, tmp_path)


def test_samples_do_not_depend_on_the_number_of_workers(tmp_path):
    assert_same_on_any_workers(jobs.trainer, tmp_path, max_iter=7, new_processes=False)


def test_a_generator_that_each_worker_has_a_copy_of_is_found(tmp_path):
    with pytest.raises(AssertionError) as caught:
        assert_same_on_any_workers(jobs.own_generator, tmp_path, max_iter=7, new_processes=False)
    text = str(caught.value)
    assert text.startswith("with 0 and with 2 workers the runs differ\n")
    assert first_lines(text)["first call that differs"].endswith(": the batch")
    with pytest.raises(ValueError, match="at least two numbers"):
        assert_same_on_any_workers(jobs.trainer, tmp_path / "b", [1])


@pytest.mark.slow
def test_new_processes_have_no_variables_of_the_module_and_say_how_they_failed(tmp_path):
    with pytest.raises(AssertionError, match="a variable of a module"):
        assert_resumes_exactly(jobs.counts_in_module, tmp_path / "module", 1, max_iter=13)
    with pytest.raises(AssertionError, match=r"(?s)the resumed run fails.*the disk is gone"):
        assert_resumes_exactly(jobs.failing, tmp_path / "failing", 1, max_iter=13)


@pytest.mark.slow
def test_pytest_knows_the_marker_and_a_function_of_a_script_is_refused(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["trainkit.testing"]\n')
    (tmp_path / "test_job.py").write_text(
        "import pytest\n\n@pytest.mark.exact\ndef test_job():\n    assert False\n\n"
        "def test_other():\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-m", "not exact", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 deselected" in done.stdout

    script = tmp_path / "script.py"
    script.write_text(
        "from functools import partial\n"
        "from trainkit.testing import assert_resumes_exactly\n"
        "def make_trainer(folder): ...\n"
        "assert_resumes_exactly(partial(make_trainer), 'runs')\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith("it is in the script that was started")
