"""The digests of same_bits.py are those of the bits, and of nothing else."""

import json

import pytest
import torch

from tests.engine.job import tiny_cfg
from tests.same_bits import digests, without_clock
from trainkit.engine import DefaultTrainer
from trainkit.utils.env import seed_all_rng


def trained(folder, *options):
    """The digests of a run with momentum."""
    cfg = tiny_cfg(folder, *options)
    seed_all_rng(cfg.SEED)
    DefaultTrainer(cfg).train()
    return digests(folder)


def differing(one, other):
    return [part for part in one if one[part] != other[part]]


def test_equal_runs_have_the_same_digests_and_another_seed_or_one_bit_changes_them(tmp_path):
    first, second, other = (
        trained(tmp_path / name, "SEED", seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert differing(first, second) == []
    assert differing(first, other) == ["weights", "optimizer", "metrics"]
    path = tmp_path / "a/model_final.pth"
    state = torch.load(path, weights_only=True)
    momentum = state["trainer"]["_trainer"]["optimizer"]["state"][0]["momentum_buffer"]
    for tensor, parts in (
        (momentum, ["optimizer"]),
        (next(iter(state["model"].values())), ["weights", "optimizer"]),
    ):
        tensor.view(torch.int32).flatten()[0] ^= 1
        torch.save(state, path)
        assert differing(first, digests(tmp_path / "a")) == parts
    torch.save({"model": state["model"]}, path)
    with pytest.raises(ValueError, match=r"has no optimizer$"):
        digests(tmp_path / "a")


def test_a_line_of_metrics_counts_without_clock_readings():
    clocks = ["time", "data_time", "rank_data_time", "eta_seconds", "tokens_per_sec", "mfu_pct"]
    line = {**dict.fromkeys(clocks, 1.0), "max_memory_mib": 2.0, "iteration": 3}
    assert without_clock(json.dumps(line)) == ""
    assert (
        without_clock(json.dumps({**line, "times": 4, "lr": 0.1}))
        == '{"iteration": 3, "lr": 0.1, "times": 4}'
    )
