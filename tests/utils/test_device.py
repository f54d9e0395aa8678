from collections import OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from trainkit.utils.device import device_of, move_to_device, resolve_device

CPU, META = torch.device("cpu"), torch.device("meta")  # the latter is not the CPU, on every machine
Pair = namedtuple("Pair", "x y")


def test_auto_takes_the_accelerator_that_torch_sees_else_the_cpu(monkeypatch):
    for found, device in (("xpu", "xpu"), (None, "cpu")):
        accelerator = found and torch.device(found)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available, a=accelerator: a
        )
        assert resolve_device("auto") == torch.device(device)
    buffers_only = nn.Module()
    buffers_only.register_buffer("mean", torch.zeros(1, device="meta"))
    assert device_of(nn.Linear(1, 1)) == CPU
    assert device_of(buffers_only) == META
    assert device_of(nn.ReLU()) is None


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


def test_a_device_that_is_there_is_taken(two_gpus):
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device(META) == META


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "no device is called 'gpu'; accepted: auto, cpu"),
        ("cuda:2", "there is no device 'cuda:2': torch sees 2 of type cuda"),
        ("mps", "there is no device 'mps': torch sees 0"),
    ],
)
def test_a_device_that_is_not_there_is_an_error_that_says_what_is(two_gpus, name, message):
    with pytest.raises(ValueError, match=message):
        resolve_device(name)


def test_tensors_in_nested_containers_are_moved_and_the_containers_keep_their_kind():
    class Batch:
        def to(self, device):
            return f"moved to {device}"

    data = {
        "list": [torch.ones(1), 2],
        "tuple": (torch.ones(1), "text"),
        "pair": Pair(torch.ones(1), None),
        "ordered": OrderedDict(x=torch.ones(1)),
        "user": UserDict(x=torch.ones(1)),
        "default": defaultdict(list, x=torch.ones(1)),  # which cannot be made from a dict
        "object": Batch(),
        "packed": pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]),  # a tuple that moves itself
    }
    moved = move_to_device(data, META)
    found = [
        moved["list"][0],
        moved["tuple"][0],
        moved["pair"].x,
        moved["ordered"]["x"],
        moved["user"]["x"],
    ]
    assert [tensor.device for tensor in [*found, moved["default"]["x"], moved["packed"].data]] == [
        META
    ] * 7
    kinds = [list, tuple, Pair, OrderedDict, UserDict, dict, str, type(data["packed"])]
    assert [type(moved[name]) for name in data] == kinds
    assert moved["list"][1] == 2
    assert moved["tuple"][1] == "text"
    assert moved["pair"].y is None
    assert moved["object"] == "moved to meta"
    assert moved["packed"].batch_sizes.tolist() == [2, 2, 1]  # torch wants these on the CPU
    tensor = data["list"][0]
    assert move_to_device({"x": tensor}, torch.device("cpu"))["x"] is tensor
