import sys
import types

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.engine.tiny import sgd
from trainkit.config import ConfigError
from trainkit.data import (
    SAMPLER_REGISTRY,
    TRANSFORM_REGISTRY,
    DatasetCatalog,
    build_train_loader,
)
from trainkit.evaluation import EVALUATOR_REGISTRY, build_evaluator
from trainkit.modeling import MODEL_REGISTRY, build_model
from trainkit.solver import (
    LR_SCHEDULER_BUILDER_REGISTRY,
    build_lr_scheduler,
    build_optimizer,
)
from trainkit.solver.build import OPTIMIZER_BUILDER_REGISTRY
from trainkit.utils.registry import Registry


def test_registered_objects_are_found_by_their_name_which_can_be_taken_once():
    registry = Registry("MODEL")

    @registry.register()
    class Net: ...

    assert registry.register(torch.nn.Linear) is torch.nn.Linear
    assert list(registry) == [("Net", Net), ("Linear", torch.nn.Linear)]
    assert registry.get("Net") == Net
    assert "Net" in registry
    assert "net" not in registry
    with pytest.raises(
        KeyError,
        match=r"did you mean 'Linear'\? registered: Linear, Net; projects and modules in IMPORTS",
    ):
        registry.get("Linaer")
    with pytest.raises(
        ValueError, match=r"'Linear' is already registered in the MODEL registry, by torch\.nn"
    ):
        registry.register(type("Linear", (), {}))
    assert registry.get("Linear") is torch.nn.Linear


def test_a_cell_of_a_notebook_that_is_executed_again_replaces_what_it_has_registered(monkeypatch):
    def define(module):
        net = type("Net", (), {"__module__": module})
        make = lambda: [net]  # noqa: E731
        make.__module__ = module
        return net, make

    first, second = define("__main__"), define("__main__")
    elsewhere = define("a_package")
    for is_notebook in (False, True):
        main = types.ModuleType("__main__")
        if not is_notebook:
            main.__file__ = "job.py"
        monkeypatch.setitem(sys.modules, "__main__", main)
        registry, catalog = Registry("MODEL"), type(DatasetCatalog)()
        registry.register(first[0])
        catalog.register("data", first[1])
        if is_notebook:
            registry.register(second[0])
            catalog.register("data", second[1])
            assert registry.get("Net") is second[0]
            assert catalog.get("data") == [second[0]]
        # a name of a module is never replaced, nor one of a script
        for net, make in [elsewhere] if is_notebook else [second, elsewhere]:
            with pytest.raises(ValueError, match="already registered"):
                registry.register(net)
            with pytest.raises(ValueError, match="registered already"):
                catalog.register("data", make)


REGISTRIES = {
    "MODEL.NAME": (MODEL_REGISTRY, "cfg", build_model),
    "INPUT.TRAIN_TRANSFORM": (TRANSFORM_REGISTRY, "cfg", build_train_loader),
    "DATALOADER.SAMPLER_TRAIN": (SAMPLER_REGISTRY, "cfg, dataset", build_train_loader),
    "TEST.EVALUATORS": (
        EVALUATOR_REGISTRY,
        "cfg, dataset_name",
        lambda cfg: build_evaluator(cfg, "toy"),
    ),
    "SOLVER.OPTIMIZER_BUILDER": (
        OPTIMIZER_BUILDER_REGISTRY,
        "cfg, model",
        lambda cfg: build_optimizer(cfg, nn.Linear(2, 2)),
    ),
    "SOLVER.LR_SCHEDULER_BUILDER": (
        LR_SCHEDULER_BUILDER_REGISTRY,
        "cfg, optimizer",
        lambda cfg: build_lr_scheduler(cfg, sgd(nn.Linear(2, 2))),
    ),
}


@pytest.mark.parametrize("key", REGISTRIES)
def test_a_registered_object_that_takes_other_arguments_is_an_error_with_its_name(
    tmp_path, monkeypatch, key
):
    registry, arguments, build = REGISTRIES[key]
    monkeypatch.setattr(registry, "_objects", {**registry._objects})

    @registry.register()
    class WithoutArguments: ...

    value = ["WithoutArguments"] if key == "TEST.EVALUATORS" else "WithoutArguments"
    with pytest.raises(ConfigError) as caught:
        build(tiny_cfg(tmp_path, key, value))
    message = f"{key}: WithoutArguments is called with ({arguments}), but takes ()"
    assert str(caught.value) == message
