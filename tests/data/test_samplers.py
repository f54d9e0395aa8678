import itertools

import pytest
import torch

from trainkit.data.samplers import InferenceSampler, TrainingSampler
from trainkit.utils import comm

INFINITE = {
    "training": lambda seed: TrainingSampler(11, seed=seed),
    "unshuffled": lambda seed: TrainingSampler(3, shuffle=False, seed=seed),
}


def take(sampler, num_samples):
    return [*itertools.islice(sampler, num_samples)]


@pytest.mark.parametrize("name", INFINITE)
def test_an_epoch_is_a_function_of_seed_and_epoch_alone_and_the_stream_is_all_of_them(name):
    before = torch.get_rng_state()
    sampler = INFINITE[name](5)
    epochs = [sampler.epoch_indices(epoch).tolist() for epoch in range(5)]
    stream = [*itertools.chain.from_iterable(epochs)]
    assert take(sampler, len(stream)) == stream
    assert take(sampler, len(stream)) == stream  # every iter() starts at the same place
    assert all(type(index) is int for index in take(sampler, 3))
    assert INFINITE[name](5).epoch_indices(4).tolist() == epochs[4]
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_and_epochs_have_orders_of_their_own_with_every_sample_once():
    orders = [
        TrainingSampler(11, seed=seed).epoch_indices(epoch)
        for seed in (0, 1, 2, 2**40)
        for epoch in range(6)
    ]
    # with seed + epoch, (0, 1) and (1, 0) would be equal
    assert len({tuple(order.tolist()) for order in orders}) == 24
    assert all(sorted(order.tolist()) == [*range(11)] for order in orders)
    assert take(TrainingSampler(3, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]
    # as in older checkpoints
    assert take(TrainingSampler(6, seed=3), 12) == [
        0,
        5,
        3,
        4,
        2,
        1,
        1,
        0,
        5,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("name", INFINITE)
@pytest.mark.parametrize(("position", "world_size"), [(0, 2), (1, 1), (37, 7)])
def test_from_any_position_the_ranks_together_draw_the_stream_of_a_single_rank(
    name, position, world_size, as_rank
):
    single = take(INFINITE[name](5), position + 20 * world_size)[position:]
    for rank in range(world_size):
        as_rank(rank, world_size)
        sampler = INFINITE[name](5)
        sampler.set_position(position)
        assert take(sampler, 20) == single[rank::world_size]
        assert sampler.start == position


def test_a_far_position_is_reached_without_walking():
    class Recording(TrainingSampler):
        def epoch_indices(self, epoch):
            epochs.append(epoch)
            return super().epoch_indices(epoch)

    epochs = []
    sampler = Recording(1000, seed=3)
    sampler.set_position(10**12 + 7)

    assert take(sampler, 2) == TrainingSampler(1000, seed=3).epoch_indices(10**9)[7:9].tolist()
    assert epochs == [10**9]
    long = TrainingSampler(2**17 + 3, seed=0)  # it comes in blocks
    assert take(long, 2**17 + 3) == long.epoch_indices(0).tolist()


def test_without_a_seed_the_ranks_agree_on_one(monkeypatch):
    monkeypatch.setattr(comm, "shared_random_seed", lambda: 123)
    assert TrainingSampler(4).seed == 123


@pytest.mark.parametrize(
    ("size", "shares"), [(9, [[0, 1, 2], [3, 4], [5, 6], [7, 8]]), (2, [[0], [1], [], []])]
)
def test_inference_divides_the_samples_into_contiguous_shares(size, shares, as_rank):
    for rank, share in enumerate(shares):
        as_rank(rank, 4)
        assert [*InferenceSampler(size)] == share
        assert len(InferenceSampler(size)) == len(share)


@pytest.mark.parametrize("sampler", [InferenceSampler, TrainingSampler])
def test_an_empty_dataset_is_refused(sampler):
    with pytest.raises(ValueError, match="size must be >= 1 sample, got 0"):
        sampler(0)
    assert next(iter(sampler(1))) == 0


def test_a_subclass_may_give_the_stream_of_all_ranks(as_rank):
    class Counting(TrainingSampler):
        def _infinite_indices(self):
            yield from range(self.start, 14)

    as_rank(1, 3)
    sampler = Counting(5, seed=1)
    sampler.set_position(6)
    assert [*sampler] == [7, 10, 13]
