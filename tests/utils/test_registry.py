import pytest
import torch

from trainkit.utils.registry import Registry


def test_registered_objects_are_found_by_their_name():
    registry = Registry("MODEL")

    @registry.register()
    class Net: ...

    def build(): ...

    assert registry.register(build) is build
    assert list(registry) == [("Net", Net), ("build", build)]
    assert (registry.get("Net"), "Net" in registry, "net" in registry) == (Net, True, False)


def test_an_unknown_name_lists_the_known_ones_and_names_imports():
    registry = Registry("MODEL")
    registry.register(torch.nn.Linear)
    registry.register(torch.nn.Conv2d)
    with pytest.raises(KeyError, match=r"did you mean 'Linear'\? registered: Conv2d, Linear, and modules in IMPORTS"):
        registry.get("Linaer")


def test_a_name_can_be_taken_once():
    registry = Registry("MODEL")
    registry.register(torch.nn.Linear)

    class Linear: ...

    with pytest.raises(ValueError, match=r"'Linear' is already registered in the MODEL registry, by torch\.nn"):
        registry.register(Linear)
    assert registry.get("Linear") is torch.nn.Linear
