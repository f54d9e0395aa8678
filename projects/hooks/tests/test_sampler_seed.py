import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Steps, Weight, sgd
from trainkit.data import ResumableLoader
from trainkit.engine import DefaultTrainer
from trainkit.engine.hook_base import HookBase
from trainkit.engine.hooks import CallbackHook, SamplerSeed
from trainkit.engine.step import SimpleTrainer


class Collect(HookBase):
    """Adds each batch that is fetched to a list."""

    def __init__(self, found, convert):
        self.found, self.convert = found, convert

    def before_train(self):
        fetch = self.trainer.fetch

        def fetch_and_add():
            batch = fetch()
            self.found.append(self.convert(batch))
            return batch

        self.trainer.fetch = fetch_and_add


def shuffled(**kwargs):
    sampler = DistributedSampler(range(6), num_replicas=1, rank=0, seed=3)
    return DataLoader(torch.arange(6.0), batch_size=2, sampler=sampler, **kwargs), sampler


def epoch_order(epoch):
    _, sampler = shuffled()
    sampler.set_epoch(epoch)
    order = [float(i) for i in sampler]
    return [order[i : i + 2] for i in (0, 2, 4)]


@pytest.mark.parametrize("steps", [2, 4, 5, 7])
def test_every_pass_has_an_order_of_its_own_wherever_in_an_iteration_it_starts(steps):
    loader, _ = shuffled()
    found = []
    trainer = SimpleTrainer(model := Weight(lambda weight, batch: weight * batch.sum()), loader, sgd(model))
    trainer.accumulation_steps = steps
    seen = Collect(found, lambda batch: batch.tolist())
    trainer.register_hooks([SamplerSeed(), seen])
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


@pytest.mark.parametrize("stop_at", range(1, 8))
def test_a_run_that_is_resumed_inside_a_pass_goes_on_with_its_order_also_if_the_epoch_is_rounded(stop_at):
    def run(start_iter, max_iter, state=None):
        loader = ResumableLoader(
            torch.arange(8.0), batch_size=1, sampler=Resumable(range(8), num_replicas=1, rank=0, seed=3)
        )
        model, found = Weight(lambda weight, batch: weight * batch.sum()), []
        trainer = SimpleTrainer(model, loader, sgd(model, lr=0.0), accumulation_steps=3)
        seen = Collect(found, float)
        trainer.register_hooks([SamplerSeed(), seen])
        if state is not None:
            trainer.load_state_dict(state)
        trainer.train(start_iter, max_iter)
        return found, trainer.state_dict()

    first, state = run(0, stop_at)
    assert first + run(stop_at, 8, state)[0] == run(0, 8)[0]


def run(loader):
    class Trainer(Steps):
        data_loader = loader
        iters_per_epoch = 2

    trainer = Trainer([SamplerSeed()])
    trainer.train(1, 5)


class WithPlainLoader(DefaultTrainer):
    """Draws from a plain DataLoader with torch's DistributedSampler; notes the samples."""

    @classmethod
    def build_train_loader(cls, cfg):
        return shuffled(generator=torch.Generator())[0]

    @classmethod
    def build_model(cls, cfg):
        return Weight(lambda weight, batch: weight * batch.sum())


def run_with_plain_loader(folder, max_iter, *options):
    options = ("SOLVER.MAX_ITER", max_iter, "TEST.EVAL_PERIOD", 0, "DATASETS.TEST", (), "SOLVER.STEPS", (), *options)
    trainer = WithPlainLoader(tiny_cfg(folder, *options))
    found = []
    trainer.register_hooks([CallbackHook(after_step=lambda trainer: found.append(trainer.batch.tolist()))])
    trainer.resume_or_load()
    trainer.train()
    return found, trainer


def test_a_plain_loader_with_a_distributed_sampler_has_another_order_in_each_epoch_by_default(tmp_path):
    found, _ = run_with_plain_loader(tmp_path / "default", 9)
    assert found == [*epoch_order(0), *epoch_order(1), *epoch_order(2)]
    switched_off = ("HOOKS", [{"NAME": "SamplerSeed", "ENABLED": False}])
    assert run_with_plain_loader(tmp_path / "off", 9, *switched_off)[0] == epoch_order(0) * 3
