"""Faults at a random iteration of three projects are found by one command, on one process and on two.

A NaN in a weight, a sample that the model cannot use, and a module that overflows.
"""

import argparse
import random
from pathlib import Path

import numpy as np
import pytest
from trainkit.projects.replay import replay
from trainkit.projects.replay.bisect import find_samples
from trainkit.projects.replay.capsule import failed_iteration
from trainkit.projects.replay.report import as_text
from trainkit.projects.replay.tests.job import PlantNan

from projects.charlm import TextWindows, encode
from projects.digits import load_split
from projects.selfsup import load_unlabeled
from tests.two_ranks import on_two_ranks
from trainkit.config import get_cfg
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultTrainer, HookBase, default_setup
from trainkit.utils import comm

ROOT = Path(__file__).resolve().parents[3]
FAULTY = 17  # the number of the sample at fault


class Planted:
    """Samples, of which one is spoilt."""

    def __init__(self, samples, spoil):
        self.samples, self.spoil = samples, spoil

    def __len__(self):
        return 40

    def sample_name(self, index):
        return f"item {index:03d}"

    def __getitem__(self, index):
        return self.spoil(self.samples[index]) if index == FAULTY else self.samples[index]


def no_image(sample):
    return {**sample, "image": np.full((8, 8), np.nan, np.float32)}


def no_token(sample):
    return {**sample, "tokens": sample["tokens"] + 97}


def windows():
    return TextWindows(encode((ROOT / "LICENSE").read_text()), 40)


SAMPLES = {
    "digits": (lambda: load_split("train"), no_image),
    "charlm": (windows, no_token),
    "selfsup": (load_unlabeled, no_image),
}
for _name, (_load, _spoil) in SAMPLES.items():
    DatasetCatalog.register(f"sound_{_name}", lambda load=_load: [load()[i] for i in range(40)])
    DatasetCatalog.register(f"planted_{_name}", lambda load=_load, spoil=_spoil: Planted(load(), spoil))

CONFIGS = {"digits": "digits/config", "charlm": "charlm/config", "selfsup": "selfsup/simsiam"}
SMALL = {
    "digits": ["CHECKPOINT.BEST_METRIC", ""],
    "charlm": ["MODEL.GPT", {"WIDTH": 16, "DEPTH": 2, "NUM_HEADS": 2}, "HOOKS", [], "CHECKPOINT.BEST_METRIC", ""],
    "selfsup": ["MODEL.WIDTH", 2, "MODEL.SIMSIAM.DIM", 8, "MODEL.SIMSIAM.HIDDEN_DIM", 4],
}
# the parameter that becomes NaN with the module that shows it first, and the module that overflows
PLACES = {
    "digits": ("layers.1.weight", "layers.1", "layers.3"),
    "charlm": ("blocks.1.down.weight", "blocks.1.down", "blocks.0.norm2"),
    "selfsup": ("predictor.0.weight", "predictor.0", "backbone.layers.4"),
}


class Overflow(HookBase):
    """A module gives inf in one iteration."""

    def __init__(self, name, at):
        self.name, self.at = name, at

    def before_step(self):
        if self.trainer.iter == self.at:
            module = next(
                module for name, module in self.trainer.model.named_modules() if name.endswith(self.name)
            )  # in a wrapper for two processes as well
            self.handle = module.register_forward_hook(lambda module, args, output: output * float("inf"))

    def after_train(self):
        if hasattr(self, "handle"):
            self.handle.remove()


class PlantNanInside(PlantNan):
    def before_step(self):
        if comm.get_world_size() > 1:
            self.name = f"module.{self.name.removeprefix('module.')}"
        super().before_step()


class Project:
    """Called: trains 12 iterations, with a checkpoint after every 4th; one of them fails."""

    def __init__(self, name, fault, folder):
        self.name, self.fault, self.folder = name, fault, folder
        self.at = random.Random(f"{name} {fault}").randrange(3, 12)

    def __call__(self):
        cfg = get_cfg()
        cfg.merge_from_file(str(ROOT / "projects" / f"{CONFIGS[self.name]}.yaml"))
        data = ["DATASETS.TRAIN", [f"{'planted' if self.fault == 'sample' else 'sound'}_{self.name}"]]
        data += ["DATASETS.VAL", [], "DATASETS.TEST", [], "TEST.EVAL_PERIOD", 0, "TEST.EVALUATORS", []]
        solver = ["SOLVER.MAX_ITER", 12, "SOLVER.IMS_PER_BATCH", 8, "SOLVER.WARMUP_ITERS", 2]
        solver += ["SOLVER.CHECKPOINT_PERIOD", 4, "LOG.PERIOD", 4, "LOG.WRITERS", [], "MODEL.DEVICE", "cpu"]
        cfg.merge_from_list(["OUTPUT_DIR", str(self.folder), *data, *solver, *SMALL[self.name]])
        default_setup(cfg, argparse.Namespace(resume=False, eval_only=False))
        trainer = DefaultTrainer(cfg)
        parameter, _, module = PLACES[self.name]
        hooks = {"weight": PlantNanInside(parameter, self.at), "module": Overflow(module, self.at), "sample": None}
        trainer.register_hooks([hooks[self.fault]])
        trainer.resume_or_load(False)
        return trainer.train()


def fail(project):
    with pytest.raises((FloatingPointError, IndexError)) as failure:
        project()
    return failure.value


def faults_found(project, found, text):
    """By the name of each thing that has to be named: whether it is."""
    parameter, module, overflowing = PLACES[project.name]
    if project.fault == "weight":
        return {"weight": found.inspection.not_finite_before == [parameter], "module": found.first_bad_module == module}
    if project.fault == "module":
        return {"module": found.first_bad_module == overflowing, "no sample": "none of them is the cause" in text}
    return {"sample": f"with item {FAULTY:03d} (1 of " in text}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["weight", "sample", "module"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_fault_is_found_by_the_capsule_of_the_step(tmp_path, name, fault):
    project = Project(name, fault, tmp_path)
    error = fail(project)

    found = replay(tmp_path / "capsule.rank0.pt", start=project, find_samples=find_samples)

    assert found.failure.startswith("it has come back")
    if fault != "sample":
        assert found.iteration == failed_iteration(error) == project.at
    named = faults_found(project, found, found.samples_at_fault)
    assert set(named.values()) == {True}, (named, as_text(found))


# each fault once; a token that is none, the sample of charlm, ends one process, and with it the run
TWO = [("digits", "weight"), ("digits", "sample"), ("charlm", "module")]


def find_on_two(rank, folder):
    results = {}
    for name, fault in TWO:
        place = Path(folder, f"{name}_{fault}")
        project = Project(name, fault, place)
        at = failed_iteration(fail(project))
        found = replay(place, at, project, find_samples=find_samples, verdict=False)
        results[name, fault] = (at, project.at, found.findings, found.samples_at_fault)
        results[name, fault] += (faults_found(project, found, found.samples_at_fault),)
    return results


@pytest.mark.slow
def test_on_two_processes_a_fault_is_found_from_the_checkpoint(tmp_path):
    first, second = on_two_ranks([find_on_two], tmp_path)["find_on_two"]

    assert isinstance(first, dict), first
    for name, fault in TWO:
        at, planted_at, findings, text, named = first[name, fault]
        assert second[name, fault][:4] == (at, planted_at, findings, text)
        assert fault == "sample" or at == planted_at
        assert set(named.values()) == {True}, (name, fault, text)
        assert len(findings) == 2
        if fault == "sample":
            assert sum("with item 017 (1 of 4 samples" in part for part in text.split("; rank ")) == 1
