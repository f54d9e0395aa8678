"""A step that fails leaves a file with which it is repeated, and the command for that."""

import errno
import re

import numpy as np
import pytest
import torch
from trainkit.projects.replay import record, replay
from trainkit.projects.replay.tests.job import At, Job, Scans

from tests.engine.job import TinyClassifier
from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import read_file
from trainkit.config import ConfigError
from trainkit.data import CombinedLoader, DatasetCatalog, build_train_loader
from trainkit.engine import DefaultTrainer
from trainkit.modeling import MODEL_REGISTRY

pytestmark = pytest.mark.slow  # runs that fail, and their replays

SCANS = ("DATASETS.TRAIN", ("tiny_scans",), "DATASETS.TEST", ())
LISTS = ("MODEL.NAME", "ListClassifier", "DATALOADER.COLLATE", "list")


def failed(job, kind=FloatingPointError):
    """The job, its capsule, and what its log says of how to repeat the failed step; "" if there is nothing."""
    with pytest.raises(kind):
        job()
    log = (job.folder / "log.txt").read_text()
    _, is_there, rest = log.rpartition("To repeat the step:")
    how_to_repeat = rest.partition("\n[")[0] if is_there else ""
    return job, job.folder / "capsule.rank0.pt", how_to_repeat


def failing(folder, iter, error, point="after_backward"):
    return Job(folder, make_hooks=lambda: [At(iter, error, point)])


@MODEL_REGISTRY.register()
class RaisingClassifier(TinyClassifier):
    """Cannot use a sample with a NaN."""

    def forward(self, batch):
        if not batch["x"].isfinite().all():
            raise KeyError("no such class")
        return super().forward(batch)


def test_a_capsule_repeats_a_loss_that_is_not_finite_and_names_the_sample(tmp_path):
    job, file, line = failed(Job(tmp_path, *SCANS))
    at = int(line.rpartition(" --iter ")[2].split()[0])

    found = replay(file, start=job, bisect=True)
    from_the_start = replay(tmp_path, at, job, verdict=False)

    assert found.failure.startswith("it has come back")
    assert "1 of 1 losses equal" in found.failure
    assert found.iteration == at == read_file(file)["capsule"]["iteration"]
    assert found.inspection.bad_samples == from_the_start.inspection.bad_samples == ["scan_017.png"]
    assert torch.equal(found.batch["x"].nan_to_num(), from_the_start.batch["x"].nan_to_num())
    assert "not finite with scan_017.png (1 of 8 samples" in found.samples_at_fault
    assert found.verdict.startswith("reproducible: ")
    assert found.is_equal


def test_an_exception_in_a_step_leaves_a_capsule_and_bisect_names_the_sample(tmp_path):
    job, file, _ = failed(Job(tmp_path, *SCANS, "MODEL.NAME", "RaisingClassifier"), KeyError)
    found = replay(file, start=job, bisect=True)
    assert found.failure == "it has come back"
    assert "KeyError with scan_017.png (1 of 8 samples" in found.samples_at_fault


def test_the_log_of_a_failed_run_has_the_command_that_repeats_its_step(tmp_path, monkeypatch):
    monkeypatch.setattr("__main__.__spec__", None)
    monkeypatch.setattr("sys.argv", ["train.py", "a"])
    start = f"{record.REPLAY} {tmp_path}/run"
    _, _, how_to_repeat = failed(failing(tmp_path / "run", 7, KeyError()), KeyError)

    capsule = f"{start}/capsule.rank0.pt -- python train.py a"
    checkpoint = f"{start} --iter 7 -- python train.py a"
    lines = [line.strip() for line in how_to_repeat.splitlines()]
    # each command is a line, which can be copied
    assert capsule in lines
    assert checkpoint in lines


@pytest.mark.parametrize("name", ["-c", "ipykernel_launcher.py"])
def test_the_log_of_a_run_without_a_file_has_calls_that_repeat_its_step(
    tmp_path, monkeypatch, name
):
    """A notebook and python -c: ``__main__`` has no file, and a notebook has the file of its kernel in argv."""
    (tmp_path / name).touch()
    monkeypatch.setattr("__main__.__spec__", None)
    monkeypatch.delattr("__main__.__file__")
    monkeypatch.setattr("sys.argv", [str(tmp_path / name), "-f", "kernel.json"])
    job, _, line = failed(failing(tmp_path / "run", 7, KeyError("mine")), KeyError)

    calls = re.findall(r"trainkit\.projects\.replay\.replay\((.*?)\) in Python", line)

    assert "python -m" not in line
    assert len(calls) == 2
    for call in calls:
        found = eval(f"replay({call})", {"replay": replay, "main": job})
        assert found.iteration == 7
        assert found.error == "KeyError: 'mine'"
        assert found.failure.startswith("it has come back")
    with pytest.raises(ConfigError, match=r"says that it was: \(not known\)"):
        replay(tmp_path / "run", 7)


def test_a_hook_that_fails_after_the_backward_pass_leaves_losses_gradients_and_a_small_file(
    tmp_path,
):
    def add_part(trainer):
        trainer.batch["part"] = torch.zeros(1_000_000)[:1]

    hooks = [At(3, action, "after_backward") for action in (add_part, KeyError("mine"))]
    job, file, _ = failed(Job(tmp_path, make_hooks=lambda: hooks), KeyError)

    found = replay(file, start=job, verdict=False)

    assert found.failure.startswith("it has come back")
    assert found.losses.keys() == {"loss_cls"}
    assert {"layers.0.weight", "layers.4.bias"} <= found.gradients.keys()
    assert read_file(file)["capsule"]["batches"][0]["part"].tolist() == [0.0]
    assert file.stat().st_size < 1_000_000


def test_a_failure_that_does_not_come_back_is_told_with_the_command_that_starts_at_the_checkpoint(
    tmp_path,
):
    failed(failing(tmp_path, 7, KeyError("once")), KeyError)
    found = replay(tmp_path / "capsule.rank0.pt", start=Job(tmp_path), bisect=True)
    assert found.failure.startswith(
        "DIFFERENT: it has not come back: in the run iteration 7 has ended with KeyError: 'once'; "
        "here it has not failed"
    )
    assert f"From the checkpoint: {record.REPLAY} {tmp_path} --iter 7 -- " in found.failure
    assert not found.is_equal
    assert found.differences[0].startswith(
        "random state and buffers are those after the forward pass"
    )
    assert "has the largest one alone" in found.samples_at_fault
    assert found.samples_at_fault.endswith(
        "statistics of each sample alone, so in the batch another one may be larger"
    )


def assert_has_no_step(job, iter, kind=FloatingPointError):
    """The file says how the run was started, and names the way from the checkpoint."""
    job, file, line = failed(job, kind)
    state = read_file(file)
    assert state["model"] == {}
    assert state["capsule"]["batches"] == []
    with pytest.raises(
        CheckpointError, match=f"holds no step: .* Give {record.REPLAY} .* --iter {iter} -- "
    ):
        replay(file, start=job)
    assert f"  {record.REPLAY} {job.folder} --iter {iter} -- " in line


@pytest.mark.parametrize("options", [("SOLVER.LOGICAL_RANKS", 2), LISTS])
def test_a_step_of_several_batches_is_repeated_from_the_checkpoint_and_the_sample_is_named(
    tmp_path, options
):
    # all in a step
    job = Job(
        tmp_path, *SCANS, *options, "SOLVER.ACCUMULATION_STEPS", 2, "SOLVER.IMS_PER_BATCH", 20
    )
    assert_has_no_step(job, 0)
    found = replay(tmp_path, 0, job, bisect=True, verdict=False)
    assert (
        found.inspection.bad_samples
        == found.inspection.samples_of_first_bad_output
        == ["scan_017.png"]
    )
    assert re.fullmatch(
        r"the loss is not finite with scan_017.png \(1 of \d+ samples, each alone\)",
        found.samples_at_fault,
    )


@MODEL_REGISTRY.register()
class OfTwoLoaders(TinyClassifier):
    def forward(self, batch):
        first = super().forward(batch["first"])["loss_cls"]
        second = super().forward(batch["second"])["loss_cls"]
        return {"loss_first": first, "loss_second": second}


class Combining(DefaultTrainer):
    """Batches of four samples, of which one of 40 is bad, and of two good ones."""

    @classmethod
    def build_train_loader(cls, cfg):
        scans = DatasetCatalog.get("tiny_scans")
        good = [scans[index] for index in range(16)]
        loaders = {
            "first": build_train_loader(cfg, dataset=scans, total_batch_size=4),
            "second": build_train_loader(cfg, dataset=good, total_batch_size=2),
        }
        return CombinedLoader(loaders, mode="each")


def test_of_a_combined_loader_the_samples_of_the_first_one_are_tried(tmp_path):
    options = ("MODEL.NAME", "OfTwoLoaders", "INPUT.TRAIN_TRANSFORM", "", "DATASETS.TEST", ())
    job, file, _ = failed(Job(tmp_path, *options, base=Combining))
    found = replay(file, start=job, bisect=True, verdict=False)
    assert re.fullmatch(
        r"the loss is not finite with sample \d of the batch \(1 of 4 samples, each alone\)",
        found.samples_at_fault,
    )
    assert found.failure.startswith("it has come back")


def test_a_failure_before_the_batch_in_the_update_or_after_it_leaves_no_step(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyError("in the middle of the update")

    assert_has_no_step(failing(tmp_path, 7, KeyError(), "before_step"), 7, KeyError)
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.SGD, "step", fail)
        assert_has_no_step(Job(tmp_path), 0, KeyError)
    _, file, line = failed(failing(tmp_path, 7, KeyError("hook"), "after_step"), KeyError)
    assert not file.exists()
    assert line == ""


def test_a_failure_of_an_earlier_iteration_leaves_no_step_but_the_right_iteration(tmp_path):
    """As asynchronous metrics, or those of several ranks, find it."""
    error = FloatingPointError("the loss is not finite in iteration 5: {'total_loss': nan}")
    assert_has_no_step(job := failing(tmp_path, 7, error), 5)
    way = replay(tmp_path, 5, job, verdict=False).on_the_way
    assert way.startswith("2 of 2 logged values equal those in capsule.rank0.pt")
    assert way.endswith("iterations 5 to 5")


class ArrayScans(Scans):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "array": np.arange(2)}


DatasetCatalog.register("tiny_arrays", ArrayScans)


def test_a_batch_that_a_file_cannot_hold_leaves_no_step_and_a_full_disk_does_not_hide_the_error(
    tmp_path, monkeypatch
):
    def write(state, path):
        raise CheckpointError(errno.ENOSPC, "no space left")

    arrays = ("DATASETS.TRAIN", ("tiny_arrays",), *LISTS, "SOLVER.IMS_PER_BATCH", 40)
    assert_has_no_step(Job(tmp_path, *arrays), 0)
    monkeypatch.setattr(record, "write_file", write)
    _, _, line = failed(failing(tmp_path, 7, KeyError("mine")), KeyError)
    warning = "WARNING: The capsule of the failed step is not written: CheckpointError:"
    assert warning in (tmp_path / "log.txt").read_text()
    assert f"  {record.REPLAY} {tmp_path} --iter 7" in line
