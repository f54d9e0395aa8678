"""A step that fails leaves a file with which it is repeated, and the command for that."""

import errno
import logging
import os
import pdb
from typing import NamedTuple

import numpy as np
import pytest
import torch
from trainkit.projects.replay import capsule, replay
from trainkit.projects.replay.bisect import find_samples
from trainkit.projects.replay.capsule import failed_iteration
from trainkit.projects.replay.tests.job import Job, PlantNan, Scans

from tests.cuda import needs_cuda
from tests.engine.job import TinyClassifier
from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import read_file
from trainkit.config import ConfigError
from trainkit.data import DatasetCatalog
from trainkit.engine import HookBase
from trainkit.modeling import MODEL_REGISTRY

SCANS = ("DATASETS.TRAIN", ("tiny_scans",))


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

    error: type[Exception] = KeyError

    def forward(self, batch):
        if not batch["x"].isfinite().all():
            raise self.error("no such class")
        return super().forward(batch)


def last_line(folder):
    """The last line about the failure of a step; "" if there is none."""
    lines = (folder / "log.txt").read_text().splitlines()
    return next((line for line in reversed(lines) if "To repeat" in line), "")


def test_a_capsule_repeats_a_loss_that_is_not_finite_and_names_the_sample(tmp_path):
    job = failed(Job(tmp_path, *SCANS))
    file = tmp_path / "capsule.rank0.pt"
    at = read_file(file)["capsule"]["iteration"]

    found = replay(file, start=job, find_samples=find_samples)
    from_the_start = replay(tmp_path, at, job, verdict=False)

    assert found.failure == "it has come back; 1 of 1 losses equal those of the run"
    assert found.iteration == at
    assert found.bad_samples == from_the_start.bad_samples == ["scan_017.png"]
    assert torch.equal(found.batch["x"].nan_to_num(), from_the_start.batch["x"].nan_to_num())
    assert found.samples_at_fault == "the loss is not finite with scan_017.png (1 of 8 samples, each alone)"
    assert found.verdict.startswith("reproducible: ")
    assert found.is_equal


def test_the_log_of_a_failed_run_has_the_command_that_repeats_its_step(tmp_path):
    failed(Job(tmp_path, make_hooks=lambda: [PlantNan("layers.0.weight", 7)]))

    line = last_line(tmp_path)

    assert " ERROR: To repeat the step: " in line
    assert f"{capsule.REPLAY} {tmp_path}/capsule.rank0.pt, or from the checkpoint: {capsule.REPLAY} {tmp_path} " in line


def test_anomaly_names_the_operation_with_the_first_nan_and_the_debugger_stops_before_it(tmp_path, monkeypatch):
    job = failed(Job(tmp_path, make_hooks=lambda: [PlantNan("layers.0.weight", 7)]))
    stops = []
    monkeypatch.setattr(pdb, "set_trace", lambda: stops.append(1))

    with pytest.warns(UserWarning, match="Error detected in"):
        found = replay(tmp_path / "capsule.rank0.pt", start=job, anomaly=True, debug=True)

    assert found.error.startswith("RuntimeError: Function ")
    assert found.failure == "not compared: autograd stops at the first anomaly"
    assert (found.verdict, found.is_equal, stops) == ("", True, [1])


def test_a_run_without_a_script_asks_for_its_command(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["-c"])
    failed(Job(tmp_path, make_hooks=lambda: [PlantNan("layers.0.weight", 7)]))

    assert last_line(tmp_path).endswith(" --iter 7 -- and the command of the run")


def test_the_largest_loss_of_a_sample_alone_is_not_that_in_the_batch_if_there_is_batch_norm(tmp_path):
    Job(tmp_path)()

    found = replay(tmp_path, 6, Job(tmp_path), find_samples=find_samples, verdict=False)

    assert "has the largest one alone" in found.samples_at_fault
    assert found.samples_at_fault.endswith("statistics of each sample alone, so in the batch another one may be larger")


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_sample_of_a_logical_rank_is_named(tmp_path, accumulation):
    options = ("SOLVER.LOGICAL_RANKS", 2, "SOLVER.ACCUMULATION_STEPS", accumulation, "DATASETS.TEST", ())
    job = failed(Job(tmp_path, *SCANS, *options))
    at = failed_at(tmp_path)

    found = replay(tmp_path, at, job, find_samples=find_samples, verdict=False)

    assert found.bad_samples == found.samples_of_first_bad_module == ["scan_017.png"]
    assert found.samples_at_fault.count("not finite with scan_017.png") == 1


def failed_at(folder):
    return int(last_line(folder).rpartition(" --iter ")[2].split()[0])


@pytest.mark.parametrize("kind", [KeyError, torch.OutOfMemoryError])
def test_an_exception_in_a_step_leaves_a_capsule_and_bisect_names_the_sample(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(RaisingClassifier, "error", kind)
    job = failed(Job(tmp_path, *SCANS, "MODEL.NAME", "RaisingClassifier"), kind)
    state = read_file(tmp_path / "capsule.rank0.pt")

    found = replay(tmp_path / "capsule.rank0.pt", start=job, find_samples=find_samples)

    assert found.failure == "it has come back"
    assert found.samples_at_fault == (
        f"the forward pass ends in {kind.__name__} with scan_017.png (1 of 8 samples, each alone)"
    )
    assert state["capsule"]["error"].startswith(f"{kind.__name__}: ")
    assert "in forward\n" in state["capsule"]["traceback"]
    assert state["capsule"]["losses"] == {}


@pytest.mark.slow
def test_micro_batches_in_lists_are_repeated_from_the_checkpoint(tmp_path):
    lists = ("MODEL.NAME", "ListClassifier", "DATALOADER.COLLATE", "list", "SOLVER.ACCUMULATION_STEPS", 2)
    job = failed(Job(tmp_path, *SCANS, *lists))
    assert_has_no_step(tmp_path, at := failed_at(tmp_path), job)

    found = replay(tmp_path, at, job, find_samples=find_samples, verdict=False)

    assert found.samples_at_fault.count("not finite with scan_017.png (1 of 8 samples, each alone)") == 1


def test_losses_and_gradients_are_seen_if_a_hook_fails_after_the_backward_pass(tmp_path):
    job = Job(tmp_path, make_hooks=lambda: [FailAt(3, KeyError("mine"))])
    failed(job, KeyError)

    found = replay(tmp_path / "capsule.rank0.pt", start=job, verdict=False)

    assert found.failure.startswith("it has come back")
    assert found.losses.keys() == {"loss_cls"}
    assert len(found.gradients) == len(found.inspection.updates) > 0


def test_a_failure_that_does_not_come_back_is_told_with_the_command_that_starts_at_the_checkpoint(tmp_path):
    failed(Job(tmp_path, make_hooks=lambda: [FailAt(7, KeyError("once"))]), KeyError)

    found = replay(tmp_path / "capsule.rank0.pt", start=Job(tmp_path))

    assert found.failure.startswith("DIFFERENT: in the run it was KeyError: 'once'; 0 of 1 losses equal")
    assert f"From the checkpoint: python -m trainkit.projects.replay {tmp_path} --iter 7" in found.failure
    assert not found.is_equal
    assert found.differences[0].startswith("random state and buffers are those after the forward pass")


@pytest.mark.slow
def test_a_run_that_has_failed_before_its_first_checkpoint_is_replayed_from_its_capsule_or_the_beginning(tmp_path):
    job = failed(Job(tmp_path, *SCANS, "SOLVER.CHECKPOINT_PERIOD", 100))
    at = read_file(tmp_path / "capsule.rank0.pt")["capsule"]["iteration"]

    found = replay(tmp_path, at, job)

    assert found.start == "the beginning"
    assert found.bad_samples == ["scan_017.png"]
    assert "logged values equal those in capsule.rank0.pt" in found.on_the_way or at == 0
    with pytest.raises(CheckpointError, match="has no checkpoint after iteration"):
        replay(tmp_path, at, job, prove=True)


def assert_has_no_step(folder, iter, job):
    """The file says how the run was started, and names the way from the checkpoint."""
    state = read_file(folder / "capsule.rank0.pt")
    assert (state["model"], state["capsule"]["batches"]) == ({}, [])
    with pytest.raises(CheckpointError, match=f"holds no step: .* Give {capsule.REPLAY} .* --iter {iter}"):
        replay(folder / "capsule.rank0.pt", start=job)
    assert f"To repeat the step: python -m trainkit.projects.replay {folder} --iter {iter}" in last_line(folder)


@pytest.mark.slow
def test_a_failure_before_the_batch_or_after_the_update_leaves_no_step(tmp_path):
    job = failed(Job(tmp_path, make_hooks=lambda: [FailAt(7, KeyError("hook"), "before_step")]), KeyError)
    assert_has_no_step(tmp_path, 7, job)

    failed(Job(tmp_path, make_hooks=lambda: [FailAt(7, KeyError("hook"), "after_step")]), KeyError)
    assert not (tmp_path / "capsule.rank0.pt").exists()
    assert "To repeat" not in last_line(tmp_path)


@pytest.mark.slow
def test_an_error_inside_the_update_leaves_no_step_with_half_an_update(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("in the middle")

    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.SGD, "step", fail)
        job = failed(Job(tmp_path), RuntimeError)

    assert_has_no_step(tmp_path, 0, job)
    assert replay(tmp_path, 0, job).start == "the beginning"


def test_a_failure_of_an_earlier_iteration_leaves_no_step_but_the_right_iteration(tmp_path):
    """As asynchronous metrics, or those of several ranks, find it."""
    error = FloatingPointError("the loss is not finite in iteration 5: {'total_loss': nan}")
    job = failed(Job(tmp_path, make_hooks=lambda: [FailAt(7, error)]))

    assert failed_iteration(error) == 5
    assert_has_no_step(tmp_path, 5, job)
    assert (
        replay(tmp_path, 5, job).on_the_way == "2 of 2 logged values equal those in capsule.rank0.pt, iterations 5 to 5"
    )


def test_a_disk_that_is_full_does_not_hide_the_error(tmp_path, monkeypatch, caplog):
    def write(state, path):
        raise CheckpointError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(capsule, "write_file", write)
    with caplog.at_level(logging.WARNING):
        failed(Job(tmp_path, make_hooks=lambda: [FailAt(7, KeyError("mine"))]), KeyError)

    assert "WARNING: The capsule of the failed step is not written: CheckpointError:" in (
        (tmp_path / "log.txt").read_text()
    )
    assert f"To repeat the step: python -m trainkit.projects.replay {tmp_path} --iter 7" in last_line(tmp_path)


class Pair(NamedTuple):
    x: torch.Tensor
    label: int


class Unknown:
    """Nothing that a file can hold."""


class OddScans(Scans):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        pair = Pair(sample["x"], sample["label"])
        return {"pair": pair, "id": np.float32(index), "array": np.arange(2), "meta": Unknown(), ("a", 1): 2}


DatasetCatalog.register("tiny_odd", OddScans)


@MODEL_REGISTRY.register()
class OddBatchClassifier(TinyClassifier):
    def forward(self, batch):
        x, label = (torch.stack([torch.as_tensor(sample["pair"][i]) for sample in batch]) for i in (0, 1))
        return super().forward({"x": x, "label": label})


def test_values_that_a_file_cannot_hold_are_converted_or_left_out_with_a_note(tmp_path):
    odd = ("DATASETS.TRAIN", ("tiny_odd",), "DATALOADER.COLLATE", "list", "MODEL.NAME", "OddBatchClassifier")
    job = failed(Job(tmp_path, *odd, "INPUT.TRAIN_TRANSFORM", "", "SOLVER.IMS_PER_BATCH", 40))

    found = replay(tmp_path / "capsule.rank0.pt", start=job, find_samples=find_samples)

    assert found.failure.startswith("it has come back")
    assert found.batch[0]["array"].tolist() == [0, 1]
    assert found.batch[3]["meta"] is None
    assert "with scan_017.png (1 of 40 samples" in found.samples_at_fault
    assert [note for note in found.differences if note.startswith("the batch/0")] == [
        "the batch/0: the keys [('a', 1)] are left out",
        "the batch/0/id: the float32 is a float now",
        "the batch/0/array: the ndarray is a Tensor now",
        "the batch/0/meta: the Unknown is left out",
    ]


@pytest.mark.slow
def test_a_new_run_moves_the_capsule_aside_and_resuming_does_not_take_it_for_a_checkpoint(tmp_path):
    failed(Job(tmp_path, make_hooks=lambda: [FailAt(7, KeyError("once"))]), KeyError)

    Job(tmp_path)(True)
    assert (tmp_path / "capsule.rank0.pt").exists()
    Job(tmp_path)()

    assert (tmp_path / "previous_1/capsule.rank0.pt").exists()
    assert not os.path.exists(tmp_path / "capsule.rank0.pt")


def test_what_is_no_capsule_is_refused(tmp_path):
    Job(tmp_path)()
    with pytest.raises(CheckpointError, match="is no capsule of a step; to replay from a checkpoint, name its folder"):
        replay(tmp_path / "model_final.pth", start=Job(tmp_path))
    with pytest.raises(ConfigError, match="is a run: give --iter; got iter=None"):
        replay(tmp_path, start=Job(tmp_path))
    with pytest.raises(ConfigError, match="is a capsule of one step: leave out --iter and --prove; got iter=3"):
        replay(tmp_path / "model_final.pth", 3, Job(tmp_path))


@needs_cuda
def test_asynchronous_metrics_find_a_failure_too_late_for_its_step_and_name_the_way_from_the_checkpoint(tmp_path):
    job = Job(tmp_path, "MODEL.DEVICE", "cuda", "LOG.PERIOD", 4, make_hooks=lambda: [PlantNan("layers.0.weight", 5)])
    failed(job)

    assert_has_no_step(tmp_path, 5, job)
    assert replay(tmp_path, 5, job, verdict=False).inspection.not_finite_before == ["layers.0.weight"]
