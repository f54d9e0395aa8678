"""The number of micro-batches changes during a run."""

import torch

from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer


def test_iterations_draw_more_and_more_of_one_stream(tmp_path):
    entry = {"NAME": "AccumulationSchedule", "FACTORS": [[3, 2], [6, 4]]}
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "SOLVER.IMS_PER_BATCH", 4, "HOOKS", [entry]))
    drawn, fetch = {}, trainer._trainer.fetch

    def fetch_and_note():
        batch = fetch()
        drawn.setdefault(trainer.iter, []).append(batch["x"])
        return batch

    trainer._trainer.fetch = fetch_and_note
    trainer.train()

    assert [len(drawn[iter]) for iter in range(10)] == [1] * 3 + [2] * 3 + [4] * 4
    stream = iter(DefaultTrainer.build_train_loader(trainer.cfg))
    found = torch.cat([batch for batches in drawn.values() for batch in batches])
    assert torch.equal(found, torch.cat([next(stream)["x"] for _ in range(25)]))
