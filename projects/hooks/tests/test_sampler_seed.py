import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.engine.job import tiny_cfg
from tests.engine.tiny import Weight, sgd
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
    return DataLoader(torch.arange(6.0), batch_size=2, sampler=sampler, **kwargs)


def epoch_order(epoch):
    loader = shuffled()
    loader.sampler.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


def test_every_pass_has_an_order_of_its_own_wherever_in_an_iteration_it_starts():
    for steps in (2, 4, 5, 7):
        found = []
        trainer = SimpleTrainer(model := Weight(lambda weight, batch: weight * batch.sum()), shuffled(), sgd(model))
        trainer.accumulation_steps = steps
        trainer.register_hooks([SamplerSeed(), Collect(found, lambda batch: batch.tolist())])
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
        loader = ResumableLoader(
            torch.arange(8.0), batch_size=1, sampler=Resumable(range(8), num_replicas=1, rank=0, seed=3)
        )
        model, found = Weight(lambda weight, batch: weight * batch.sum()), []
        trainer = SimpleTrainer(model, loader, sgd(model, lr=0.0), accumulation_steps=3)
        trainer.register_hooks([SamplerSeed(), Collect(found, float)])
        if state is not None:
            trainer.load_state_dict(state)
        trainer.train(start_iter, max_iter)
        return found, trainer.state_dict()

    for stop_at in range(1, 8):
        first, state = run(0, stop_at)
        assert first + run(stop_at, 8, state)[0] == run(0, 8)[0]


class WithPlainLoader(DefaultTrainer):
    """Draws from a plain DataLoader with torch's DistributedSampler; notes the samples."""

    @classmethod
    def build_train_loader(cls, cfg):
        return shuffled(generator=torch.Generator())

    @classmethod
    def build_model(cls, cfg):
        return Weight(lambda weight, batch: weight * batch.sum())


def run_with_plain_loader(folder, *options):
    options = ("SOLVER.MAX_ITER", 9, "TEST.EVAL_PERIOD", 0, "DATASETS.TEST", (), "SOLVER.STEPS", (), *options)
    trainer = WithPlainLoader(tiny_cfg(folder, *options))
    found = []
    trainer.register_hooks([CallbackHook(after_step=lambda trainer: found.append(trainer.batch.tolist()))])
    trainer.train()
    return found


def test_a_plain_loader_with_a_distributed_sampler_has_another_order_in_each_epoch_by_default(tmp_path):
    found = run_with_plain_loader(tmp_path / "default")
    assert found == [*epoch_order(0), *epoch_order(1), *epoch_order(2)]
    switched_off = ("HOOKS", [{"NAME": "SamplerSeed", "ENABLED": False}])
    assert run_with_plain_loader(tmp_path / "off", *switched_off) == epoch_order(0) * 3
