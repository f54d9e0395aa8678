"""A step that fails leaves a file with which it is repeated, and the command for that."""

import errno

import numpy as np
import pytest
import torch
from trainkit.projects.replay import record, replay
from trainkit.projects.replay.tests.job import Job, PlantNan, Scans

from tests.engine.job import TinyClassifier
from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import read_file
from trainkit.config import ConfigError
from trainkit.data import DatasetCatalog
from trainkit.engine import HookBase
from trainkit.modeling import MODEL_REGISTRY

SCANS = ("DATASETS.TRAIN", ("tiny_scans",))
LISTS = ("SOLVER.ACCUMULATION_STEPS", 2, "MODEL.NAME", "ListClassifier", "DATALOADER.COLLATE", "list")


def failed(job, kind=FloatingPointError):
    with pytest.raises(kind):
        job()
    return job


class FailAt(HookBase):
    def __init__(self, at, error, point="after_backward"):
        self.at, self.error = at, error
        setattr(self, point, self.fail)

    def fail(self):
        if self.trainer.iter == self.at:
            raise self.error


@MODEL_REGISTRY.register()
class RaisingClassifier(TinyClassifier):
    """Cannot use a sample with a NaN."""

    def forward(self, batch):
        if not batch["x"].isfinite().all():
            raise KeyError("no such class")
        return super().forward(batch)


def last_line(folder):
    """The last line about the failure of a step; "" if there is none."""
    lines = (folder / "log.txt").read_text().splitlines()
    return next((line for line in reversed(lines) if "To repeat" in line), "")


def failed_at(folder):
    return int(last_line(folder).rpartition(" --iter ")[2].split()[0])


def assert_has_no_step(folder, iter, job):
    """The file says how the run was started, and names the way from the checkpoint."""
    state = read_file(folder / "capsule.rank0.pt")
    assert (state["model"], state["capsule"]["batches"]) == ({}, [])
    with pytest.raises(CheckpointError, match=f"holds no step: .* Give {record.REPLAY} .* --iter {iter} -- "):
        replay(folder / "capsule.rank0.pt", start=job)
    assert f"To repeat the step: {record.REPLAY} {folder} --iter {iter} -- " in last_line(folder)


# ---------------------------------------------------------------------- capsules with a step


def test_a_capsule_repeats_a_loss_that_is_not_finite_and_names_the_sample(tmp_path):
    job = failed(Job(tmp_path, *SCANS))
    file, at = tmp_path / "capsule.rank0.pt", failed_at(tmp_path)

    found = replay(file, start=job, bisect=True)
    from_the_start = replay(tmp_path, at, job, verdict=False)

    assert found.failure == "it has come back; 1 of 1 losses equal those of the run"
    assert found.iteration == at == read_file(file)["capsule"]["iteration"]
    assert found.inspection.bad_samples == from_the_start.inspection.bad_samples == ["scan_017.png"]
    assert torch.equal(found.batch["x"].nan_to_num(), from_the_start.batch["x"].nan_to_num())
    assert found.samples_at_fault == "the loss is not finite with scan_017.png (1 of 8 samples, each alone)"
    assert found.verdict.startswith("reproducible: ")
    assert found.is_equal


def test_an_exception_in_a_step_leaves_a_capsule_and_bisect_names_the_sample(tmp_path):
    job = failed(Job(tmp_path, *SCANS, "MODEL.NAME", "RaisingClassifier"), KeyError)

    found = replay(tmp_path / "capsule.rank0.pt", start=job, bisect=True)

    assert found.failure == "it has come back"
    assert found.samples_at_fault == "the forward pass ends in KeyError with scan_017.png (1 of 8 samples, each alone)"


@pytest.mark.parametrize(("argv", "command"), [("SCRIPT", "python {} a"), ("-c", "and the command of the run")])
def test_the_log_of_a_failed_run_has_the_command_that_repeats_its_step(tmp_path, monkeypatch, argv, command):
    script = str(tmp_path / "train.py") if argv == "SCRIPT" else argv
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("sys.argv", [script, "a"])
    monkeypatch.setattr("__main__.__spec__", None)
    failed(Job(tmp_path / "run", make_hooks=lambda: [PlantNan("layers.0.weight", 7)]))

    tail, start = f" -- {command.format(script)}", f"{record.REPLAY} {tmp_path}/run"
    whole = f"{start}/capsule.rank0.pt{tail}, or from the checkpoint: {start} --iter 7{tail}"
    assert last_line(tmp_path / "run").endswith(f" ERROR: To repeat the step: {whole}")


def test_the_largest_loss_of_a_sample_alone_is_not_that_in_the_batch_if_there_is_batch_norm(tmp_path):
    Job(tmp_path)()

    found = replay(tmp_path, 6, Job(tmp_path), bisect=True, verdict=False)

    assert "has the largest one alone" in found.samples_at_fault
    assert found.samples_at_fault.endswith("statistics of each sample alone, so in the batch another one may be larger")


def test_a_hook_that_fails_after_the_backward_pass_leaves_losses_gradients_and_a_small_file(tmp_path):
    class AddPart(HookBase):
        def after_backward(self):
            self.trainer.batch["part"] = torch.zeros(1_000_000)[:1]

    job = failed(Job(tmp_path, make_hooks=lambda: [AddPart(), FailAt(3, KeyError("mine"))]), KeyError)
    file = tmp_path / "capsule.rank0.pt"

    found = replay(file, start=job, verdict=False)

    assert found.failure.startswith("it has come back")
    assert found.losses.keys() == {"loss_cls"}
    assert {"layers.0.weight", "layers.4.bias"} <= found.gradients.keys()
    assert read_file(file)["capsule"]["batches"][0]["part"].tolist() == [0.0]
    assert file.stat().st_size < 1_000_000


def test_a_failure_that_does_not_come_back_is_told_with_the_command_that_starts_at_the_checkpoint(tmp_path):
    failed(Job(tmp_path, make_hooks=lambda: [FailAt(7, KeyError("once"))]), KeyError)

    found = replay(tmp_path / "capsule.rank0.pt", start=Job(tmp_path))

    assert found.failure.startswith("DIFFERENT: in the run it was KeyError: 'once'; 0 of 1 losses equal")
    assert f"From the checkpoint: {record.REPLAY} {tmp_path} --iter 7 -- " in found.failure
    assert not found.is_equal
    assert found.differences[0].startswith("random state and buffers are those after the forward pass")


# ---------------------------------------------------------------------- steps that are repeated from a checkpoint


def test_a_run_that_has_failed_before_its_first_checkpoint_is_replayed_from_the_beginning(tmp_path):
    job = failed(Job(tmp_path, "SOLVER.CHECKPOINT_PERIOD", 100, make_hooks=lambda: [PlantNan("layers.0.weight", 7)]))

    found = replay(tmp_path, 7, job)

    assert (found.start, found.error[:18]) == ("the beginning", "FloatingPointError")
    assert "logged values equal those in capsule.rank0.pt, iterations 0 to 6" in found.on_the_way
    with pytest.raises(CheckpointError, match="has no checkpoint after iteration"):
        replay(tmp_path, 7, job, prove=True)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("SOLVER.LOGICAL_RANKS", 2, "SOLVER.ACCUMULATION_STEPS", 2), LISTS])
def test_a_step_of_several_batches_is_repeated_from_the_checkpoint_and_the_sample_is_named(tmp_path, options):
    job = failed(Job(tmp_path, *SCANS, *options, "DATASETS.TEST", ()))
    assert_has_no_step(tmp_path, at := failed_at(tmp_path), job)

    found = replay(tmp_path, at, job, bisect=True, verdict=False)

    assert found.inspection.bad_samples == found.inspection.samples_of_first_bad_output == ["scan_017.png"]
    assert found.samples_at_fault.count("not finite with scan_017.png (1 of ") == 1


def test_a_failure_before_the_batch_in_the_update_or_after_it_leaves_no_step(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyError("in the middle of the update")

    assert_has_no_step(
        tmp_path, 7, failed(Job(tmp_path, make_hooks=lambda: [FailAt(7, KeyError(), "before_step")]), KeyError)
    )
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.SGD, "step", fail)
        assert_has_no_step(tmp_path, 0, failed(Job(tmp_path), KeyError))
    failed(Job(tmp_path, make_hooks=lambda: [FailAt(7, KeyError("hook"), "after_step")]), KeyError)
    assert not (tmp_path / "capsule.rank0.pt").exists()
    assert "To repeat" not in last_line(tmp_path)


def test_a_failure_of_an_earlier_iteration_leaves_no_step_but_the_right_iteration(tmp_path):
    """As asynchronous metrics, or those of several ranks, find it."""
    error = FloatingPointError("the loss is not finite in iteration 5: {'total_loss': nan}")
    job = failed(Job(tmp_path, make_hooks=lambda: [FailAt(7, error)]))

    assert_has_no_step(tmp_path, 5, job)
    way = replay(tmp_path, 5, job, verdict=False).on_the_way
    assert way == "2 of 2 logged values equal those in capsule.rank0.pt, iterations 5 to 5"


class ArrayScans(Scans):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "array": np.arange(2)}


DatasetCatalog.register("tiny_arrays", ArrayScans)


def test_a_batch_that_a_file_cannot_hold_leaves_no_step(tmp_path):
    odd = ("DATASETS.TRAIN", ("tiny_arrays",), "DATALOADER.COLLATE", "list", "MODEL.NAME", "ListClassifier")
    job = failed(Job(tmp_path, *odd))

    assert_has_no_step(tmp_path, failed_at(tmp_path), job)


def test_a_disk_that_is_full_does_not_hide_the_error(tmp_path, monkeypatch):
    def write(state, path):
        raise CheckpointError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(record, "write_file", write)
    failed(Job(tmp_path, make_hooks=lambda: [FailAt(7, KeyError("mine"))]), KeyError)

    log = (tmp_path / "log.txt").read_text()
    assert "WARNING: The capsule of the failed step is not written: CheckpointError:" in log
    assert f"To repeat the step: {record.REPLAY} {tmp_path} --iter 7" in last_line(tmp_path)


def test_what_is_no_capsule_is_refused(tmp_path):
    Job(tmp_path)()
    with pytest.raises(CheckpointError, match="is no capsule of a step; to replay from a checkpoint, name its folder"):
        replay(tmp_path / "model_final.pth", start=Job(tmp_path))
    with pytest.raises(ConfigError, match="iter=3, .* or a capsule without --iter and --prove"):
        replay(tmp_path / "model_final.pth", 3, Job(tmp_path))
