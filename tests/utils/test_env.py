"""Seeds."""

import logging
import os
import random

import numpy as np
import pytest
import torch

from trainkit.utils.env import TORCH_VERSION, seed_all_rng
from trainkit.utils.rng import get_rng_state, set_rng_state


@pytest.fixture(autouse=True)
def keep_random_state():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_one_seed_fixes_all_generators_and_another_changes_all():
    assert seed_all_rng(3) == 3
    first = draw()
    seed_all_rng(3)
    assert draw() == first
    seed_all_rng(4)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_without_a_seed_one_is_drawn_logged_and_returned(caplog):
    caplog.set_level(logging.INFO)
    seed_all_rng(0)
    seed = seed_all_rng()
    first = draw()
    assert caplog.messages == [f"Using the random seed {seed}"]
    assert seed_all_rng() != seed
    seed_all_rng(seed)
    assert draw() == first


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_the_ends_of_the_range_are_seeds(seed):
    assert seed_all_rng(seed) == seed


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_an_error(seed):
    with pytest.raises(ValueError, match="between 0 and"):
        seed_all_rng(seed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_without_cuda_the_random_state_of_its_devices_is_left_out_with_a_warning(caplog):
    state = get_rng_state()
    first = draw()
    set_rng_state({**state, "cuda": [torch.get_rng_state()]})
    assert draw() == first
    assert caplog.messages == ["The random state of devices that this machine does not have is ignored"]


def test_seeding_leaves_the_environment_alone():
    before = dict(os.environ)
    seed_all_rng(1)
    assert dict(os.environ) == before


def test_the_version_of_torch_can_be_compared():
    assert TORCH_VERSION >= (2, 6)
    assert torch.__version__.startswith(".".join(map(str, TORCH_VERSION)))
