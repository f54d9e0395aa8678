"""The search for the largest batch size."""

import pytest
from trainkit.projects.finders import batch_size
from trainkit.projects.finders.memory import search

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer


@pytest.mark.parametrize(
    ("memory", "start", "limit", "tried", "found"),
    [
        (23, 8, 1000, [8, 16, 32, 24, 20, 22], 22),
        (5, 64, 1000, [64, 32, 16, 8, 4, 6, 5], 5),
        (10**6, 3, 20, [3, 6, 12, 20], 20),
        (0, 4, 20, [4, 2, 1], 0),
    ],
)
def test_a_size_is_doubled_until_memory_runs_out_and_then_found_within_an_eighth(
    memory, start, limit, tried, found
):
    seen = []

    def fits(size):
        seen.append(size)
        return size <= memory

    assert search(fits, start, lambda: limit) == found
    assert seen == tried


class Mistaken(DefaultTrainer):
    @classmethod
    def build_optimizer(cls, cfg, model):
        raise RuntimeError("a mistake")


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The file of a job, in the present folder."""
    monkeypatch.chdir(tmp_path)
    options = ["MODEL.NAME", "NeedsMemory", "SOLVER.ACCUMULATION_STEPS", 2]
    options += ["SOLVER.REFERENCE_BATCH_SIZE", 16]
    (tmp_path / "job.yaml").write_text(tiny_cfg("output", *options).dump())
    return "job.yaml"


@pytest.mark.slow
def test_real_steps_are_made_with_each_size(config, tmp_path, capsys):
    words = ["--config-file", config, "--steps", "2", "--max-batch-size", "100"]

    assert batch_size.main(batch_size.parse_args(words)) == 22

    _, _, *rows, fastest, suggested = capsys.readouterr().out.splitlines()
    assert [int(row.split()[0]) for row in rows] == [8, 16, 20, 22, 24, 32]
    assert ["out of memory" in row for row in rows] == [False] * 4 + [True] * 2
    assert all(int(row.split()[-1].replace(",", "")) > 0 for row in rows[:4])
    assert fastest.startswith("fastest: ")
    assert suggested.startswith("suggested: SOLVER.IMS_PER_BATCH 22 ")
    assert [path.name for path in tmp_path.iterdir()] == [config]


def test_on_a_cpu_the_largest_size_to_try_must_be_given(config):
    args = batch_size.parse_args(["--config-file", config, "MODEL.DEVICE", "cpu"])
    with pytest.raises(
        ConfigError, match="memory that runs out may end other programs too; give --max-batch-size"
    ):
        batch_size.main(args)


def test_a_mistake_is_no_lack_of_memory():
    with pytest.raises(RuntimeError, match="a mistake"):
        batch_size.try_size(tiny_cfg("output"), Mistaken, 4, 1)
