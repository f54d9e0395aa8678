"""What a trainer tells the parts of a loader before each pass."""

import logging

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
)

from tests.engine.tiny import Weight, sgd
from trainkit.data import CombinedLoader, ResumableLoader
from trainkit.engine.step import SimpleTrainer

DATA = torch.arange(6.0)


def shuffled():
    return DistributedSampler(range(6), num_replicas=1, rank=0, seed=3)


class Prefetching:
    """A wrapper of a user's around a loader."""

    def __init__(self, loader):
        self.inner = loader

    def __len__(self):
        return len(self.inner)

    def __iter__(self):
        return iter(self.inner)


LOADERS = {
    "sampler": lambda: DataLoader(DATA, batch_size=2, sampler=shuffled()),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(shuffled(), 2, False)),
    "wrapped": lambda: Prefetching(DataLoader(DATA, batch_size=2, sampler=shuffled())),
    "of trainkit": lambda: ResumableLoader(DATA, batch_size=2, sampler=shuffled()),
    "combined": lambda: CombinedLoader({"a": DataLoader(DATA, batch_size=2, sampler=shuffled())}),
}


def epoch_order(epoch):
    """The batches of an epoch: DistributedSampler's order by torch's own loop."""
    sampler = shuffled()
    sampler.set_epoch(epoch)
    order = [float(index) for index in sampler]
    return [order[0:2], order[2:4], order[4:6]]


def run(loader, max_iter, *, start_iter=0, state=None, **options):
    model = Weight(lambda weight, batch: weight * batch.sum())
    trainer = SimpleTrainer(model, loader, sgd(model, lr=0.0), **options)
    found = []
    model.register_forward_pre_hook(lambda model, args: found.append(args[0].flatten().tolist()))
    if state is not None:
        trainer.load_state_dict(state)
    trainer.train(start_iter, max_iter)
    return found, trainer.state_dict()


@pytest.mark.parametrize("kind", LOADERS)
def test_each_pass_has_the_order_of_its_epoch(kind):
    orders = [*epoch_order(0), *epoch_order(1), *epoch_order(2)]
    assert run(LOADERS[kind](), 9)[0] == orders
    assert epoch_order(0) != epoch_order(1) != epoch_order(2)
    if kind != "combined":
        assert run(LOADERS[kind](), 4, accumulation_steps=2)[0] == orders[:8]


def test_a_resumed_run_starts_its_data_again_in_the_order_of_its_epoch():
    _, state = run(LOADERS["sampler"](), 4)
    found, _ = run(LOADERS["sampler"](), 8, start_iter=4, state=state)
    assert found == [*epoch_order(1), epoch_order(2)[0]]


class ToldStream(IterableDataset):
    epoch = None

    def __iter__(self):
        yield from [self.epoch] * 2

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_without_a_length_are_told_the_number_of_the_pass(num_workers):
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = ResumableLoader(ToldStream(), batch_size=1, **workers)
    assert run(loader, 6)[0] == [[0.0], [0.0], [1.0], [1.0], [2.0], [2.0]]


class Told(Dataset):
    epoch = -1

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(float(self.epoch))

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_of_a_plain_loader_is_told_the_epoch(num_workers):
    loader = DataLoader(Subset(Told(), range(4)), batch_size=2, num_workers=num_workers)
    assert run(loader, 6)[0] == [[0.0] * 2] * 2 + [[1.0] * 2] * 2 + [[2.0] * 2] * 2


def test_workers_of_a_plain_loader_that_stay_are_not_told_and_this_is_logged(caplog):
    loader = DataLoader(Told(), batch_size=2, num_workers=1, persistent_workers=True)
    with caplog.at_level(logging.WARNING, logger="trainkit"):
        run(loader, 4)
    texts = [text for text in caplog.messages if "persistent_workers" in text]
    assert len(texts) == 1
    assert "the epoch does not reach Told" in texts[0]
