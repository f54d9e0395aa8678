import pytest
import torch

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
