"""Every attribute that a public hook changes while it trains is in its state, or in the table of the documentation."""

import copy
import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from test_family import MAKE, Job
from torch import nn

from trainkit.engine.hooks import HookBase
from trainkit.utils.env import seed_all_rng

PAGE = (Path(__file__).parents[3] / "docs" / "exact_resume.md").read_text()
# what a hook only points to has a state of its own: trainer, model, optimizer, checkpointer, writers, loader
OTHERS = {"trainer", "checkpointer", "_model", "_layers", "_writers", "_data_loader"}
OTHERS |= {"_optimizer", "_given_optimizer", "_targets"}

NOT_KEPT = {tuple(row) for row in re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE, re.MULTILINE)}


def fingerprint(value, seen=()):
    """Something that is equal for equal values, of whatever a hook may hold."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.detach().cpu().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, nn.Module):
        return {name: fingerprint(item) for name, item in value.state_dict().items()}
    if isinstance(value, dict):
        return {str(key): fingerprint(item, seen) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [fingerprint(item, seen) for item in value]
    if isinstance(value, str | int | float | bool | type(None) | Path):
        return repr(value)
    if isinstance(value, types.FunctionType | types.MethodType | type) or id(value) in seen:
        return type(value).__name__
    if isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        return fingerprint(value.state_dict())
    if type(value).__module__.startswith("trainkit.") and not isinstance(value, HookBase):
        return {name: fingerprint(item, (*seen, id(value))) for name, item in attributes(value).items()}
    return type(value).__name__


def attributes(value):
    return {name: item for name, item in vars(value).items() if name not in OTHERS}


class Snapshot(HookBase):
    """What a hook holds at its start and behind every iteration, and what is saved behind iteration 4."""

    def __init__(self, job):
        self.job, self.taken = job, {}

    def take(self):
        return {name: fingerprint(item) for name, item in attributes(self.job.hook).items()}

    def before_train(self):
        self.taken["begin"] = self.take()

    def after_step(self):
        self.taken[self.trainer.iter] = self.take()
        if self.trainer.iter == 4:
            self.state = copy.deepcopy(self.trainer.state_dict())
            self.model = copy.deepcopy(self.job.model.state_dict())


def snapshots(name, folder, resume_from=None):
    seed_all_rng(0)
    job = Job(name, folder)
    job.trainer.data_loader = job.data[:1]  # so that it does not matter where it stands
    snapshot = Snapshot(job)
    job.trainer.register_hooks([snapshot], priority="LOWEST")
    if resume_from is None:
        job.train(0, 9)
    else:
        job.model.load_state_dict(resume_from.model)
        job.trainer.load_state_dict(resume_from.state)
        job.train(5, 9)
    return snapshot


@pytest.fixture(params=sorted(MAKE), scope="module")
def whole(request, tmp_path_factory):
    return request.param, snapshots(request.param, tmp_path_factory.mktemp("whole"))


def changed(snapshot):
    """Names of the attributes that training changes."""
    begin = snapshot.taken["begin"]
    steps = [taken for iter, taken in snapshot.taken.items() if iter != "begin"]
    return {name for taken in steps for name in taken if taken[name] != begin.get(name, "absent")}


def test_what_training_changes_is_resumed_or_in_the_table(whole, tmp_path):
    name, first = whole
    resumed = snapshots(name, tmp_path, first)
    kept = changed(first) - {attribute for hook, attribute in NOT_KEPT if hook == name}
    for iter in (5, 6, 7, 8):
        assert {k: resumed.taken[iter].get(k) for k in kept} == {k: first.taken[iter].get(k) for k in kept}


def test_the_table_names_nothing_else(whole, tmp_path):
    name, first = whole
    assert {attribute for hook, attribute in NOT_KEPT if hook == name} <= changed(first)


def test_a_state_that_is_left_out_is_noticed(whole, tmp_path):
    name, first = whole
    if not first.state["hooks"].get(name):
        assert name in WITHOUT_STATE
        return
    state = {**first.state, "hooks": {key: value for key, value in first.state["hooks"].items() if key != name}}
    without = types.SimpleNamespace(state=state, model=first.model)
    assert name not in WITHOUT_STATE
    resumed = snapshots(name, tmp_path, without)
    if name not in SAME_ANYWAY:
        assert any(resumed.taken[iter] != first.taken[iter] for iter in (5, 6, 7, 8))


WITHOUT_STATE = {
    *(
        "AccumulationSchedule",
        "AutogradProfiler",
        "CallbackHook",
        "CheckFiniteLoss",
        "EmptyCache",
        "Freeze",
        "GarbageCollection",
    ),
    *("CopyAhead", "GradNorm", "TimeLimit"),
    *("IterationTimer", "LRScheduler"),
    *("MemorySnapshot", "ParamScheduler", "PublishWeights", "RuntimeInfo", "SamplerSeed", "Throughput"),
    *("TorchMemoryStats", "TorchProfiler", "UnusedParameters", "VisualizationHook"),
}
# what their states are for lies in after_train, in files, on other ranks, in a seed that was drawn, in other schedules
SAME_ANYWAY = {"EvalHook", "FinalEvalHook", "PeriodicCheckpointer", "PeriodicWriter", "PreciseBN"}
SAME_ANYWAY |= {"SyncBuffers"}
