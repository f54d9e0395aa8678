"""What a project adds: hooks of every run; with its key, wrappers of the parts."""

import sys
from types import ModuleType

import pytest
import torch

from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer, HookBase
from trainkit.utils import plugins
from trainkit.utils.loading import installed


def test_every_default_trainer_has_the_hooks_of_installed_projects(monkeypatch, tmp_path):
    module = ModuleType("a_project")
    module.Recorder = type("Recorder", (HookBase,), {"priority": "HIGH"})
    monkeypatch.setitem(sys.modules, "a_project", module)
    # the latter is not installed
    table = {
        "Recorder": "a_project",
        "Missing": "trainkit.projects.not_there.options",
    }
    monkeypatch.setattr("trainkit.engine.defaults.RUN_HOOKS", table)
    names = [type(hook).__name__ for hook in DefaultTrainer(tiny_cfg(tmp_path)).hooks]
    assert names.count("Recorder") == 1
    assert names.index("Recorder") < names.index("LRScheduler")


def test_a_project_whose_key_is_used_wraps_the_model_and_the_loaders(monkeypatch, tmp_path):
    def wrap_model(cfg, model):
        with torch.no_grad():
            model.layers[0].weight.mul_(cfg.MODEL.SCALE)
        return model

    def wrap_loader(cfg, loader):
        wrapped.append(loader)
        # its own way to these
        loader.first_batches = lambda num: asked.append(num) or [*loader][:num]
        return loader

    module, wrapped, asked = ModuleType("a_wrapper"), [], []
    module.wrap_model, module.wrap_loader = wrap_model, wrap_loader
    module.add_config = lambda cfg: cfg.MODEL.update(SCALE=0.0)
    monkeypatch.setitem(sys.modules, "a_wrapper", module)
    monkeypatch.setitem(plugins.CONFIG_KEYS, "MODEL.SCALE", "a_wrapper")

    torch.manual_seed(0)
    plain = DefaultTrainer(tiny_cfg(tmp_path))
    torch.manual_seed(0)
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "MODEL.SCALE", 2.0, "TEST.MAX_BATCHES", 2))
    trainer.test(trainer.cfg, trainer.model)

    assert torch.equal(trainer.model.layers[0].weight, 2 * plain.model.layers[0].weight)
    assert [trainer.data_loader, 2] == [wrapped[0], *asked]


def test_a_broken_project_is_not_taken_for_a_missing_one(monkeypatch, tmp_path):
    (tmp_path / "broken_project.py").write_text("import not_there_either")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_either"):
        list(installed({"Hook": "broken_project"}))
