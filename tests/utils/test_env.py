"""Seeds, random states, and the table of a bug report."""

import logging
import os
import platform
import random
import runpy
import sys

import numpy as np
import pytest
import torch

from trainkit.utils.collect_env import collect_env_info
from trainkit.utils.env import (
    TORCH_VERSION,
    get_rng_state,
    preserve_rng_state,
    seed_all_rng,
    set_rng_state,
)


@pytest.fixture(autouse=True)
def keep_random_state():
    with preserve_rng_state():
        yield


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_one_seed_fixes_all_generators_and_another_changes_all():
    environment = dict(os.environ)
    assert seed_all_rng(3) == 3
    first = draw()
    seed_all_rng(3)
    assert draw() == first
    assert seed_all_rng(2**32 - 1) == 2**32 - 1
    assert all(a != b for a, b in zip(draw(), first, strict=True))
    with pytest.raises(ValueError, match="between 0 and"):
        seed_all_rng(2**32)
    assert dict(os.environ) == environment


def test_without_a_seed_one_is_drawn_logged_and_returned(caplog):
    caplog.set_level(logging.INFO)
    seed = seed_all_rng()
    first = draw()
    [text] = caplog.messages
    assert text.endswith(f" {seed}")
    assert seed_all_rng() != seed
    seed_all_rng(seed)
    assert draw() == first
    assert TORCH_VERSION >= (2, 6)  # it can be compared


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_a_state_gives_the_same_numbers_without_that_of_devices_which_are_not_there():
    state = get_rng_state()
    with preserve_rng_state():
        first = draw()
    assert draw() == first
    set_rng_state({**state, "cuda": [torch.get_rng_state()]})
    assert draw() == first


def test_the_table_of_a_bug_report_is_a_command(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "trainkit.utils.collect_env")
    runpy.run_module("trainkit.utils.collect_env", run_name="__main__")
    text = capsys.readouterr().out
    assert text == collect_env_info() + "\n"
    rows = dict(line.split(maxsplit=1) for line in text.splitlines() if line[0] != "-")
    assert rows["platform"] == platform.platform()
    assert rows["numpy"] == np.__version__
    assert {"python", "trainkit", "torch", "fvcore", "CPU", "CUDA"} <= set(rows)
