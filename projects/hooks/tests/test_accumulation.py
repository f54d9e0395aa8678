"""The number of micro-batches changes during a run."""

import pytest
import torch

from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer

HOOK = ("HOOKS", [{"NAME": "AccumulationSchedule", "FACTORS": [[3, 2], [6, 4]]}])
KEY = ("SOLVER.ACCUMULATION_FACTORS", [[3, 2], [6, 4]])


def train(folder, *options, last=10, resume=False, factors=HOOK):
    """The trainer, and the batches of each iteration."""
    torch.manual_seed(0)
    trainer = DefaultTrainer(tiny_cfg(folder, "SOLVER.IMS_PER_BATCH", 4, *factors, *options))
    trainer.resume_or_load(resume=resume)
    drawn, fetch = {}, trainer._trainer.fetch

    def fetch_and_note():
        batch = fetch()
        drawn.setdefault(trainer.iter, []).append(batch["x"])
        return batch

    trainer._trainer.fetch = fetch_and_note
    trainer.train(max_iter=last)
    return trainer, drawn


@pytest.mark.parametrize("factors", [HOOK, KEY], ids=["hook", "key"])
def test_iterations_draw_more_and_more_of_one_stream_also_after_a_resume(tmp_path, factors):
    whole, batches = train(tmp_path / "whole", factors=factors)
    train(tmp_path / "stopped", "SOLVER.CHECKPOINT_PERIOD", 1, last=4, factors=factors)
    resumed, rest = train(tmp_path / "stopped", "SOLVER.CHECKPOINT_PERIOD", 1, resume=True, factors=factors)

    assert [len(batches[iter]) for iter in range(10)] == [1] * 3 + [2] * 3 + [4] * 4
    stream = iter(DefaultTrainer.build_train_loader(whole.cfg))
    found = torch.cat([batch for drawn in batches.values() for batch in drawn])
    assert torch.equal(found, torch.cat([next(stream)["x"] for _ in range(25)]))
    assert [*rest] == [4, 5, 6, 7, 8, 9]
    state = resumed.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in whole.model.state_dict().items())
