import itertools
import random
import sys
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from trainkit.data import MapDataset
from trainkit.data.seeding import (
    draws_from_torch_alone,
    seed_globals,
    splitmix64,
    undisturbed_globals,
)


def test_the_numbers_are_those_of_the_published_generator():
    assert [splitmix64(1234567, n) for n in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert splitmix64(0, 0) == 16294208416658607535
    assert splitmix64(2**64 + 5, 10**12) == splitmix64(5, 10**12) < 2**64


def test_all_bits_of_a_number_matter_and_the_generators_draw_different_numbers():
    def drawn(number):
        before = (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )
        with undisturbed_globals():
            seed_globals(number)
            integers = (
                int(np.random.randint(2**31)),
                int(torch.randint(2**31, ())),
                random.getrandbits(31),
            )
        assert len({*integers}) == 3
        assert (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        ) == before
        return integers

    first = drawn(1 << 32 | 1)

    assert (
        drawn(1 << 32 | 1) == first == (1791095845, 2135392491, 495925058)
    )  # those of earlier versions
    assert [a == b for a, b in zip(drawn(1 << 32 | 2), first, strict=True)] == [True, False, False]
    assert [a == b for a, b in zip(drawn(2 << 32 | 1), first, strict=True)] == [False, True, False]


CROPS = """
import torch
class Crops:
    'Crops, flipped at random; random_crop is a name like others.'
    def __getitem__(self, index):
        return torch.rand(3)
def identity(sample):
    return sample
"""
NUMBERS = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Import a module with this source."""
    monkeypatch.syspath_prepend(tmp_path)

    def module(source):
        name = f"module_of_seeding_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(source)
        return __import__(name)

    return module


def test_code_that_names_no_other_generator_draws_from_torch_alone(module, monkeypatch):
    crops = module(CROPS)
    helper = module(
        f"import os, json, torch, numpy as np\nfrom {crops.__name__} import *\nclass Own(Crops): ..."
    )
    for dataset in (
        crops.Crops(),
        Subset(helper.Own(), [0]),
        MapDataset(crops.Crops(), crops.identity),
        [1, 2],
    ):
        assert draws_from_torch_alone(dataset, torch.stack)

    typed = ModuleType("typed_at_a_prompt")  # without source
    monkeypatch.setitem(sys.modules, typed.__name__, typed)
    exec("class Dataset: ...", vars(typed))
    assert not draws_from_torch_alone(typed.Dataset())


@pytest.mark.parametrize(
    "line", ["import random", "from numpy import random as npr", "draw = np.random"]
)
def test_a_mention_of_random_is_found(module, line):
    augment = module(
        f"import numpy, numpy as np\n{line}\ndef augment(sample): ...\nclass Augment: ..."
    )
    crops = module(CROPS)
    user = module(f"import {augment.__name__} as helper\nclass Dataset: ...")
    base = module(f"from {augment.__name__} import Augment\nclass Dataset(Augment): ...")
    held = crops.Crops()
    held.transforms = {"train": [None, partial(augment.augment)]}
    mapped = MapDataset(Subset(crops.Crops(), [0]), augment.augment)
    for dataset in (augment.Augment(), mapped, held, user.Dataset(), base.Dataset()):
        assert not draws_from_torch_alone(dataset, torch.stack)
    assert not draws_from_torch_alone(crops.Crops(), augment.augment)
