"""The digests of same_bits.py are those of the bits, and of nothing else."""

import json
import subprocess
import sys

import pytest
import torch

from tests.engine.job import tiny_cfg
from tests.same_bits import ROOT, digests, without_clock
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


def test_equal_runs_have_the_same_digests_and_another_seed_changes_all(tmp_path):
    first, second, other = (trained(tmp_path / name, "SEED", seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))

    assert differing(first, second) == []
    assert differing(first, other) == ["weights", "optimizer", "metrics"]


@pytest.mark.parametrize(
    ("entries", "part"), [(["model"], "weights"), (["trainer", "_trainer", "optimizer", "state"], "optimizer")]
)
def test_one_bit_of_one_tensor_changes_the_digest_of_its_part(tmp_path, entries, part):
    before = trained(tmp_path)
    path = tmp_path / "model_final.pth"
    state = torch.load(path, weights_only=True)
    inner = state
    for entry in entries:
        inner = inner[entry]
    tensor = next(iter(inner.values())) if part == "weights" else inner[0]["momentum_buffer"]
    tensor.view(torch.int32).flatten()[0] ^= 1
    torch.save(state, path)

    assert differing(before, digests(tmp_path)) == [part]


def test_a_checkpoint_without_an_optimizer_has_no_digests(tmp_path):
    torch.save({"model": {"x": torch.ones(1)}}, tmp_path / "model_final.pth")
    (tmp_path / "metrics.json").write_text('{"iteration": 1, "total_loss": 1.0}\n')

    with pytest.raises(ValueError, match=r"has no optimizer$"):
        digests(tmp_path)


def test_a_line_of_metrics_counts_without_clock_readings():
    clocks = ["time", "data_time", "rank_data_time", "eta_seconds", "tokens_per_sec", "mfu_pct"]
    line = {**dict.fromkeys(clocks, 1.0), "max_memory_mib": 2.0, "iteration": 3}

    assert without_clock(json.dumps(line)) == ""
    assert without_clock(json.dumps({**line, "times": 4, "lr": 0.1})) == '{"iteration": 3, "lr": 0.1, "times": 4}'


@pytest.mark.slow
def test_the_script_names_the_part_that_differs_from_its_record(tmp_path):
    def run(action):
        command = [sys.executable, ROOT / "tests/same_bits.py", action, "bits.json", "--only", "gan"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines()[-1].split(), done.stderr

    file = tmp_path / "bits.json"
    recorded = run("record")
    same = run("compare")
    file.write_text(json.dumps({"gan": {**json.loads(file.read_text())["gan"], "optimizer": "0"}}))

    assert (recorded[0], recorded[2]) == (0, "")
    assert same == (0, ["gan", "same", "same", "same"], "")
    assert run("compare") == (1, ["gan", "same", "DIFFERENT", "same"], "")
