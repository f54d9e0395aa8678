"""The search for the largest batch size."""

import pytest
import torch

from tests.engine.job import TinyClassifier, tiny_cfg
from tools import find_batch_size
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer
from trainkit.modeling import MODEL_REGISTRY


@pytest.mark.parametrize(
    ("memory", "start", "limit", "tried", "found"),
    [
        (23, 8, 1000, [8, 16, 32, 24, 20, 22], 22),
        (5, 64, 1000, [64, 32, 16, 8, 4, 6, 5], 5),
        (10**6, 3, 20, [3, 6, 12, 20], 20),
        (0, 4, 20, [4, 2, 1], 0),
    ],
)
def test_a_size_is_doubled_until_memory_runs_out_and_then_found_within_an_eighth(memory, start, limit, tried, found):
    seen = []
    assert find_batch_size.search(lambda size: bool(seen.append(size)) or size <= memory, start, lambda: limit) == found
    assert seen == tried


@MODEL_REGISTRY.register()
class NeedsMemory(TinyClassifier):
    """For 23 samples there is enough memory."""

    def forward(self, batch):
        assert self.training
        if len(batch["label"]) > 23:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(batch)


@pytest.fixture
def job(tmp_path, monkeypatch):
    def job(*options):
        cfg = tiny_cfg(tmp_path / "output", *options)
        (tmp_path / "job.yaml").write_text(cfg.dump())
        return ["--config-file", "job.yaml", "--steps", "2"]

    monkeypatch.chdir(tmp_path)
    return job


@pytest.mark.slow
def test_real_steps_are_made_with_each_size_and_a_table_is_printed(job, tmp_path, capsys):
    args = job("MODEL.NAME", "NeedsMemory", "SOLVER.ACCUMULATION_STEPS", 2, "SOLVER.REFERENCE_BATCH_SIZE", 16)

    assert find_batch_size.main(find_batch_size.parse_args([*args, "--max-batch-size", "100"])) == 22

    _, _, *rows, fastest, suggested = capsys.readouterr().out.splitlines()
    assert [int(row.split()[0]) for row in rows] == [8, 16, 20, 22, 24, 32]
    assert ["out of memory" in row for row in rows] == [False] * 4 + [True] * 2
    assert all(int(row.split()[-1].replace(",", "")) > 0 for row in rows[:4])
    assert fastest.startswith("fastest: ")
    assert suggested.startswith("suggested: SOLVER.IMS_PER_BATCH 22 ")
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


class Mistaken(DefaultTrainer):
    @classmethod
    def build_optimizer(cls, cfg, model):
        raise RuntimeError("a mistake")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "on a CPU, memory that runs out may end other programs too; give --max-batch-size"),
        (["--steps", "0"], "--steps is 0; accepted: 1 or more"),
        (["--max-batch-size", "9", "MODEL.NAME", "Absent"], "Absent"),
    ],
)
def test_a_mistake_is_an_error_and_no_lack_of_memory(job, words, error):
    with pytest.raises(ConfigError, match=error):
        find_batch_size.main(find_batch_size.parse_args([*job(), *words]))
    with pytest.raises(RuntimeError, match="a mistake"):
        find_batch_size.try_size(tiny_cfg("output"), Mistaken, 4, 1)
