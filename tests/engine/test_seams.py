"""What a project adds: hooks of every run; its other seams are tested in tests/config/test_projects.py."""

import sys

from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer

RECORDER = """
NAMES = {"Recorder": "recorder.hooks"}
RUN_HOOKS = ["Recorder"]
"""
HOOKS = """
from trainkit.engine import HookBase


class Recorder(HookBase):
    priority = "HIGH"
"""


def test_every_default_trainer_has_the_hooks_of_installed_projects(plug_in, tmp_path):
    (plug_in("recorder", RECORDER) / "hooks.py").write_text(HOOKS)
    names = [type(hook).__name__ for hook in DefaultTrainer(tiny_cfg(tmp_path)).hooks]
    assert names.count("Recorder") == 1
    assert names.index("Recorder") < names.index("LRScheduler")


LOADER = """
asked = []


def add_config(cfg):
    cfg.TEST.OWN_WAY = False


def wrap_loader(cfg, loader):
    def first_batches(num):
        asked.append(num)
        return [*loader][:num]

    loader.first_batches = first_batches
    return loader
"""


def test_a_loader_that_a_project_has_wrapped_may_cut_itself(plug_in, tmp_path):
    plug_in("own_way", LOADER)
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "TEST.OWN_WAY", True, "TEST.MAX_BATCHES", 2))
    trainer.test(trainer.cfg, trainer.model)
    assert sys.modules["own_way.plugin"].asked == [2]
