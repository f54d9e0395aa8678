"""The number of micro-batches changes during a run."""

import pytest
import torch
from trainkit.projects.replay import replay
from trainkit.projects.replay.tests.job import Job
from trainkit.projects.replay.tests.skip_job import same, train

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError, check_values, scale_workers
from trainkit.data import DatasetCatalog, TrainingSampler
from trainkit.engine import DefaultTrainer, SimpleTrainer

FACTORS = ("SOLVER.IMS_PER_BATCH", 4, "SOLVER.ACCUMULATION_FACTORS", [[3, 2], [6, 4]])
SIZES = [4] * 3 + [8] * 3 + [16] * 4


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_iterations_draw_more_and_more_of_one_stream_also_after_a_resume(tmp_path):
    whole, plain = train(tmp_path / "plain", *FACTORS)
    train(tmp_path / "stopped", *FACTORS, "SOLVER.CHECKPOINT_PERIOD", 1, last=3)
    trainer, resumed = train(tmp_path / "stopped", *FACTORS, resume=True)

    assert [len(plain.batches[iter]) for iter in range(10)] == SIZES
    stream = iter(DefaultTrainer.build_train_loader(whole.cfg))
    assert torch.equal(torch.cat([*plain.batches.values()]), torch.cat([next(stream)["x"] for _ in range(25)]))
    assert same(resumed.batches, plain.batches, {iter: iter for iter in range(4, 10)})
    assert all(torch.equal(value, weights(trainer)[name]) for name, value in weights(whole).items())


def test_a_step_with_more_micro_batches_is_replayed(tmp_path):
    job = Job(tmp_path, *FACTORS, "TEST.EVAL_PERIOD", 0, "SOLVER.CHECKPOINT_PERIOD", 5)
    job()
    found = replay(tmp_path, 7, job, prove=True)

    order = torch.cat([TrainingSampler(40, seed=1).epoch_indices(epoch) for epoch in range(3)])
    inputs = torch.stack([DatasetCatalog.get("tiny_train")[index]["x"] / 2 for index in order[52:68]])
    assert torch.equal(torch.cat([batch["x"] for batch in found.batch]), inputs)
    assert [len(outputs) for outputs in found.inspection.samples] == [4] * 4
    assert "every byte equals model_final" in found.proof


def test_batch_norm_is_warned_of_and_a_second_run_starts_with_the_first_number(tmp_path, caplog):
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *FACTORS, "TEST.EVAL_PERIOD", 0))
    assert "Batch norm treats each micro-batch separately: [(0, 1), (3, 2), (6, 4)] do not" in caplog.text
    trainer.train()
    assert trainer.accumulation_steps == 4
    trainer.train(0, 1)
    assert trainer.accumulation_steps == 1


def test_lengths_in_epochs_are_an_error_and_other_numbers_of_workers_move_the_changes(tmp_path):
    cfg = tiny_cfg(tmp_path, *FACTORS, "SOLVER.MAX_ITER", "2ep")
    with pytest.raises(
        ConfigError,
        match="SOLVER.MAX_ITER: got '2ep' .*; accepted: iterations, since an epoch of these data has no length",
    ):
        DefaultTrainer(cfg)
    cfg = tiny_cfg(tmp_path, *FACTORS, "SOLVER.REFERENCE_WORLD_SIZE", 1, "DATALOADER.SKIP", [])
    assert scale_workers(cfg, 3).SOLVER.ACCUMULATION_FACTORS == [[1, 2], [2, 4]]


class Told(torch.utils.data.RandomSampler):
    def set_epoch(self, epoch):
        pass


class OfSamplers(DefaultTrainer):
    @classmethod
    def build_train_loader(cls, cfg):
        data = DatasetCatalog.get("tiny_train")
        return torch.utils.data.DataLoader(data, batch_size=4, sampler=Told(data))


def test_a_sampler_that_must_be_told_its_epoch_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="SamplerSeed: these hooks use epochs, but .* is set"):
        OfSamplers(tiny_cfg(tmp_path, *FACTORS)).train()


@pytest.mark.parametrize("factors", [[[0, 2]], [[5, 2], [5, 4]], [[5, 0]], [5, 2], [[5, 1.5]]])
def test_factors_that_make_no_sense_are_errors(tmp_path, factors):
    with pytest.raises(ConfigError, match=r"ACCUMULATION_FACTORS: got .*; accepted: a list of \[iter, factor\]"):
        check_values(tiny_cfg(tmp_path, "SOLVER.ACCUMULATION_FACTORS", factors))


@pytest.mark.parametrize("steps", [[], [(1, 2)], [(0, 1), (0, 2)]])
def test_a_schedule_that_makes_no_sense_is_an_error(steps):
    model = torch.nn.Linear(1, 1)
    with pytest.raises(
        ValueError, match=r"accumulation_steps is .*; accepted: a number, or pairs \(iteration, number\)"
    ):
        SimpleTrainer(model, [], torch.optim.SGD(model.parameters(), 0.1), accumulation_steps=steps)


@pytest.mark.parametrize("other", [("SOLVER.MAX_BATCHES_PER_EPOCH", 2), ("DATALOADER.SKIP", [[1, 2]])])
def test_settings_that_count_batches_by_iteration_are_errors(tmp_path, other):
    with pytest.raises(ConfigError, match="SOLVER.ACCUMULATION_FACTORS and .* exclude each other"):
        check_values(tiny_cfg(tmp_path, *FACTORS, *other))
