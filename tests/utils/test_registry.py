"""Registries and dotted paths."""

import re

import pytest
import torch

from trainkit.engine.hooks import HOOK_REGISTRY, EMAHook
from trainkit.utils.registry import Registry


def test_registered_objects_are_found_by_their_name():
    registry = Registry("MODEL")

    @registry.register()
    class Net: ...

    def build(): ...

    assert registry.register(build) is build
    assert (registry.get("Net"), registry.get("build")) == (Net, build)
    assert list(registry) == [("Net", Net), ("build", build)]
    assert "Net" in registry
    assert "net" not in registry


def test_an_unknown_name_lists_the_known_ones_and_names_imports():
    registry = Registry("MODEL")
    with pytest.raises(KeyError, match=r"no 'Net' in the MODEL registry; registered: nothing\. .* in IMPORTS"):
        registry.get("Net")
    registry.register(torch.nn.Linear)
    registry.register(torch.nn.Conv2d)
    with pytest.raises(KeyError, match=r"did you mean 'Linear'\? registered: Conv2d, Linear\. .* in IMPORTS"):
        registry.get("Linaer")


def test_a_name_can_be_taken_once():
    registry = Registry("MODEL")
    registry.register(torch.nn.Linear)

    class Linear: ...

    with pytest.raises(ValueError, match=r"'Linear' is already registered in the MODEL registry, by torch\.nn"):
        registry.register(Linear)
    assert registry.get("Linear") is torch.nn.Linear


@pytest.fixture
def fruit():
    registry = Registry("FRUIT")

    @registry.register()
    class Apple:
        def __init__(self, colour, *, weight=1, basket=None):
            self.given = colour, weight, basket

    return registry


def test_a_dict_with_a_name_is_built_in_the_spelling_of_a_config_and_in_that_of_mmengine(fruit):
    assert fruit.build({"NAME": "Apple", "COLOUR": "red", "WEIGHT": 2}).given == ("red", 2, None)
    assert fruit.build({"type": "Apple", "colour": "red", "weight": 2}).given == ("red", 2, None)
    assert fruit.build({"NAME": "Apple", "WEIGHT": 2}, "red", basket=7, weight=3).given == ("red", 2, 7)


def test_building_changes_nothing_in_the_dict(fruit):
    entry = {"NAME": "Apple", "COLOUR": "red"}
    fruit.build(entry)
    assert entry == {"NAME": "Apple", "COLOUR": "red"}


@pytest.mark.parametrize("entry", [{"COLOUR": "red"}, {"NAME": 3}, "Apple", None], ids=str)
def test_a_dict_that_names_nothing_is_refused(fruit, entry):
    with pytest.raises(TypeError, match=re.escape(f"got {entry!r}")):
        fruit.build(entry)


def test_a_wrong_name_and_a_wrong_argument_are_named(fruit):
    with pytest.raises(KeyError, match="no 'Appel' in the FRUIT registry; did you mean 'Apple'"):
        fruit.build({"NAME": "Appel"})
    with pytest.raises(TypeError, match=r"Apple.__init__\(\) got an unexpected keyword argument 'size'"):
        fruit.build({"NAME": "Apple", "COLOUR": "red", "SIZE": 3})
    with pytest.raises(TypeError, match=r"Apple.__init__\(\) missing 1 required positional argument: 'colour'"):
        fruit.build({"NAME": "Apple"})


def test_a_hook_is_built_as_the_document_of_mmengine_writes_it():
    hook = HOOK_REGISTRY.build({"NAME": "EMAHook", "DECAY": 0.5, "EVALUATE": "both"})
    assert (type(hook), hook.evaluate) == (EMAHook, "both")
    assert HOOK_REGISTRY.build({"type": "EMAHook", "evaluate": "raw"}).evaluate == "raw"
