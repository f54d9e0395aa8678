"""What depends on the epoch: the order of a sampler, and periods."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Weight, sgd
from trainkit.data import ResumableLoader
from trainkit.engine import DefaultTrainer
from trainkit.engine.hooks import SamplerSeed, is_due_epoch
from trainkit.engine.step import SimpleTrainer
from trainkit.utils.periods import periods_done


def sum_model():
    return Weight(lambda weight, batch: weight * batch.sum())


def noting(trainer):
    """A list that gets each batch that the model gets."""
    found = []
    trainer.model.register_forward_pre_hook(lambda model, args: found.append(args[0].tolist()))
    return found


def shuffled(**kwargs):
    sampler = DistributedSampler(range(6), num_replicas=1, rank=0, seed=3)
    return DataLoader(torch.arange(6.0), batch_size=2, sampler=sampler, **kwargs)


def epoch_order(epoch):
    loader = shuffled()
    loader.sampler.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("steps", [2, 4, 5, 7])
def test_every_pass_has_an_order_of_its_own_wherever_in_an_iteration_it_starts(steps):
    trainer = SimpleTrainer(model := sum_model(), shuffled(), sgd(model), accumulation_steps=steps)
    found = noting(trainer)
    trainer.register_hooks([SamplerSeed()])
    trainer.train(0, 6)
    assert found == [batch for epoch in range(2 * steps) for batch in epoch_order(epoch)]


class Resumable(DistributedSampler):
    """Knows its place in a pass, and not which one it is, as torchdata's StatefulDistributedSampler."""

    place = 0

    def __iter__(self):
        order = [*super().__iter__()]
        while self.place < len(order):
            self.place += 1
            yield order[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state_dict):
        self.place = state_dict["place"]


def test_a_run_that_is_resumed_inside_a_pass_goes_on_with_its_order_also_if_the_epoch_is_rounded():
    def run(start_iter, max_iter, state=None):
        sampler = Resumable(range(8), num_replicas=1, rank=0, seed=3)
        loader = ResumableLoader(torch.arange(8.0), batch_size=1, sampler=sampler)
        trainer = SimpleTrainer(
            model := sum_model(), loader, sgd(model, lr=0.0), accumulation_steps=3
        )
        found = noting(trainer)
        trainer.register_hooks([SamplerSeed()])
        if state is not None:
            trainer.load_state_dict(state)
        trainer.train(start_iter, max_iter)
        return found, trainer.state_dict()

    for stop_at in range(1, 8):
        first, state = run(0, stop_at)
        assert first + run(stop_at, 8, state)[0] == run(0, 8)[0]


class WithPlainLoader(DefaultTrainer):
    """Draws from a plain DataLoader with torch's DistributedSampler."""

    @classmethod
    def build_train_loader(cls, cfg):
        return shuffled(generator=torch.Generator())

    @classmethod
    def build_model(cls, cfg):
        return sum_model()


def test_a_plain_loader_with_a_distributed_sampler_has_another_order_in_each_epoch_by_default(
    tmp_path,
):
    options = ("SOLVER.MAX_ITER", 6, "TEST.EVAL_PERIOD", 0, "DATASETS.TEST", (), "SOLVER.STEPS", ())
    trainer = WithPlainLoader(tiny_cfg(tmp_path, *options))
    found = noting(trainer)
    trainer.train()
    assert found == [*epoch_order(0), *epoch_order(1)]
    without_length = SimpleNamespace(has_epochs=False, data_loader=SimpleNamespace(set_epoch=print))
    assert not SamplerSeed.is_needed(without_length)


def test_a_period_in_epochs_is_due_by_the_number_of_the_epoch():
    def due(max_iter, *arguments, **options):
        ends = [
            SimpleNamespace(iter=iter, max_iter=max_iter, epoch_length=3)
            for iter in range(2, 30, 3)
        ]
        for trainer in ends:
            trainer.epoch = periods_done(trainer.iter, 3)
        return [trainer.epoch for trainer in ends if is_due_epoch(trainer, *arguments, **options)]

    assert [due(31, 4), due(31, 2, offset=5), due(31, 0)] == [[3, 7], [4, 6, 8], []]
    assert [due(31, 4, or_last=True), due(30, 4, or_last=True)] == [[3, 7], [3, 7, 9]]
