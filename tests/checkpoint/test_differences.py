"""Where two states or the folders of two runs differ."""

import copy
import json

import pytest
import torch

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.differences import (
    differing,
    differing_checkpoints,
    differing_metrics,
    files_in,
    is_of_the_clock,
    metrics_in,
)
from trainkit.checkpoint.file import write_file


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), "1 of 2 values, by at most 0"),
        (
            torch.ones(2, dtype=torch.bfloat16),
            torch.tensor([1, 1.5]).bfloat16(),
            "1 of 2 values, by at most 0.5",
        ),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), "1 of 1 values, by at most nan"),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse(), "2 of 4 values, by at most 1"),
        (
            torch.zeros(2),
            torch.zeros(2, dtype=torch.float64),
            "torch.float32 [2] and torch.float64 [2]",
        ),
        (0.0, -0.0, "0.0 and -0.0"),
        (1, True, ""),
        ([1], (1,), ""),
        ({"a": None}, {"b": None}, ""),
    ],
)
def test_values_are_compared_by_their_bits(left, right, said):
    found = list(differing({"x": left}, {"x": right}))
    assert found == [f"x: {said}"] if said else found
    for value in (left, right, torch.empty(0, 2), [1, [torch.tensor([float("nan")])]]):
        assert list(differing({"x": value}, {"x": copy.deepcopy(value)})) == []


def test_a_structure_with_many_ways_to_one_object_is_compared_once():
    left, right = [1], [2]
    for _ in range(40):  # 2**40 ways lead to the number
        left, right = [left, left], [right, right]
    path = "/0" * 41
    assert list(differing({"x": left}, {"x": right})) == [f"x{path}: 1 and 2"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("run_id", True),
        ("trainer/origin", True),
        ("trainer/storage/histories/time", True),
        ("ranks/1/trainer/storage/histories/data_time", True),
        ("trainer/hooks/PeriodicWriter#2/writers/0/state/length", True),
        ("trainer/hooks/PeriodicWriter/writers/0/state/taken/eta_seconds", True),
        ("trainer/hooks/PeriodicWriter/writers/2/state/run_id", True),  # of Weights & Biases
        ("trainer/storage/histories/total_loss", False),
        ("trainer/storage/histories/loss/time", False),
        ("trainer/rng", False),
        ("model/time", False),
    ],
)
def test_an_entry_that_differs_between_equal_runs_is_known_by_its_path(path, expected):
    assert is_of_the_clock(path) == expected


def test_names_of_ones_own_can_be_clock_readings():
    path = "trainer/storage/histories/my/clock"
    assert not is_of_the_clock(path)
    assert is_of_the_clock(path, ["my/clock"])


def write_run(folder, value, lines):
    (folder / "previous_1").mkdir(parents=True)
    (folder / "previous_1/model_old.pth").write_text("of another run")
    state = {"model": {"w": torch.tensor([value])}, "run_id": str(folder)}
    write_file(state, folder / "model_final.pth")
    (folder / "metrics.json").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(folder)


def test_the_folders_of_two_runs_are_compared_without_clocks_and_earlier_runs(tmp_path):
    lines = [{"iteration": 1, "loss": 2.0, "time": 3.0}, {"iteration": 2, "time": 3.0}]
    other_lines = [{"iteration": 1, "loss": 2.5, "time": 4.0}, {"iteration": 3, "loss": 1.0}]
    left = write_run(tmp_path / "a", 1.0, lines)
    same = write_run(tmp_path / "b", 1.0, lines[:1])
    other = write_run(tmp_path / "c", 2.0, other_lines)
    write_file({}, tmp_path / "c/extra.pth")

    assert files_in(left, ".pth") == ["model_final.pth"]
    assert list(differing_checkpoints(left, same)) == []
    assert list(differing_metrics(left, same)) == []
    assert list(differing_checkpoints(left, other)) == [
        "extra.pth: only in the second",
        "model_final.pth: model/w: 1 of 1 values, by at most 1",
    ]
    assert list(differing_metrics(left, other)) == [
        "metrics.json: iteration 1: loss: 2.0 and 2.5",
        "metrics.json: 1 and 2 lines",
    ]
    assert list(differing_metrics(left, other, ["loss", "time"])) == []
    (tmp_path / "c/metrics.json").unlink()
    assert list(differing_metrics(left, other)) == ["metrics.json: only in the first"]
    assert list(differing_metrics(other, left)) == ["metrics.json: only in the second"]


@pytest.mark.parametrize("text", ["{", "3", '"a"', "[" * 100_000])
def test_lines_that_are_no_metrics_are_an_error_with_the_path(tmp_path, text):
    path = tmp_path / "metrics.json"
    path.write_text(text)
    with pytest.raises(
        CheckpointError, match=r"cannot read '.+/metrics\.json' as lines of metrics"
    ):
        metrics_in(path)
