import itertools
import math

import pytest
import torch
from torch.utils.data import SequentialSampler

from trainkit.data.samplers import (
    GroupedBatchSampler,
    InferenceSampler,
    RandomSubsetTrainingSampler,
    RepeatFactorTrainingSampler,
    TrainingSampler,
)
from trainkit.data.samplers.training import LimitedSampler
from trainkit.utils import comm

INFINITE = {
    "training": lambda seed: TrainingSampler(11, seed=seed),
    "unshuffled": lambda seed: TrainingSampler(3, shuffle=False, seed=seed),
    "subset": lambda seed: RandomSubsetTrainingSampler(20, 0.4, seed_shuffle=seed, seed_subset=seed),
    "repeat_factor": lambda seed: RepeatFactorTrainingSampler([1.5, 0.25, 3.0, 1.0, 0.5, 2.0, 1.0], seed=seed),
    "limited": lambda seed: LimitedSampler(RepeatFactorTrainingSampler([1.5, 1.0, 3.0, 2.5] * 3, seed=seed), 7),
    "repeated": lambda seed: LimitedSampler(TrainingSampler(30, seed=seed), 7, repeat_first=True),
}
SHUFFLED = ["training", "subset", "repeat_factor", "limited"]


def take(sampler, num_samples):
    return [*itertools.islice(sampler, num_samples)]


@pytest.mark.parametrize("name", INFINITE)
def test_the_stream_is_the_epochs_one_behind_the_other(name):
    sampler = INFINITE[name](5)
    epochs = torch.cat([sampler.epoch_indices(epoch) for epoch in range(5)]).tolist()

    assert take(sampler, len(epochs)) == epochs
    assert take(sampler, len(epochs)) == epochs  # every iter() starts at the same place
    assert all(type(index) is int for index in take(sampler, 3))


@pytest.mark.parametrize("name", INFINITE)
def test_an_epoch_is_a_function_of_seed_and_epoch_alone(name):
    walked = INFINITE[name](5)
    take(walked, 40)
    torch.manual_seed(99)

    assert INFINITE[name](5).epoch_indices(7).tolist() == walked.epoch_indices(7).tolist()


@pytest.mark.parametrize("name", SHUFFLED)
def test_seeds_and_epochs_have_orders_of_their_own(name):
    orders = {
        tuple(INFINITE[name](seed).epoch_indices(epoch).tolist()) for seed in (0, 1, 2, 2**40) for epoch in range(6)
    }
    assert len(orders) == 24  # with seed + epoch, (0, 1) and (1, 0) would be equal


@pytest.mark.parametrize("name", INFINITE)
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_the_ranks_together_draw_the_stream_of_a_single_rank(name, world_size, as_rank):
    single = take(INFINITE[name](5), 20 * world_size)
    shares = []
    for rank in range(world_size):
        as_rank(rank, world_size)
        shares.append(take(INFINITE[name](5), 20))

    assert [index for of_all_ranks in zip(*shares, strict=True) for index in of_all_ranks] == single


@pytest.mark.parametrize("name", INFINITE)
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 3)])
@pytest.mark.parametrize("position", [0, 1, 10, 11, 12, 37])
def test_starting_at_a_position_equals_walking_there(name, rank, world_size, position, as_rank):
    walked = take(INFINITE[name](5), position + 60)[position:]

    as_rank(rank, world_size)
    entered = INFINITE[name](5)
    entered.set_position(position)

    assert take(entered, 20) == walked[rank::world_size][:20]
    assert entered.start == position


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


def test_a_long_epoch_comes_complete_and_in_order():
    size = 2**17 + 3
    sampler = TrainingSampler(size, seed=0)
    assert take(sampler, size) == sampler.epoch_indices(0).tolist()


def test_drawing_leaves_the_global_torch_generator_alone():
    before = torch.get_rng_state()
    for make in INFINITE.values():
        take(make(5), 50)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", INFINITE)
def test_a_negative_seed_or_position_is_refused(name):
    with pytest.raises(ValueError, match=r"seed must be None .* or >= 0, got -1"):
        INFINITE[name](-1)
    with pytest.raises(ValueError, match="num_samples must be >= 0 samples of the global stream, got -2"):
        INFINITE[name](5).set_position(-2)


def test_without_a_seed_the_ranks_agree_on_one(monkeypatch):
    seeds = iter([123, 456, 789])
    monkeypatch.setattr(comm, "shared_random_seed", lambda: next(seeds))

    assert TrainingSampler(4).seed == 123
    subset = RandomSubsetTrainingSampler(10, 0.5)
    assert (subset.seed, subset.seed_subset) == (456, 789)


def test_an_epoch_of_training_draws_every_sample_once():
    sampler = TrainingSampler(6, seed=0)
    for epoch in range(3):
        assert sorted(sampler.epoch_indices(epoch).tolist()) == [0, 1, 2, 3, 4, 5]
    assert take(TrainingSampler(3, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]
    assert sampler.samples_per_epoch == 6


def test_a_subset_is_the_same_in_all_epochs_and_depends_on_its_own_seed():
    def subset(seed_shuffle, seed_subset):
        sampler = RandomSubsetTrainingSampler(100, 0.29, seed_shuffle=seed_shuffle, seed_subset=seed_subset)
        epochs = [sampler.epoch_indices(epoch).tolist() for epoch in range(2)]
        assert epochs[0] != epochs[1]
        assert sorted(epochs[0]) == sorted(epochs[1]) == sampler.subset_indices.tolist()
        assert sampler.samples_per_epoch == len({*epochs[0]}) == 29
        return sampler.subset_indices.tolist()

    assert subset(0, 1) == subset(7, 1)
    assert subset(0, 1) != subset(0, 2)
    unshuffled = RandomSubsetTrainingSampler(100, 0.29, shuffle=False, seed_shuffle=0, seed_subset=1)
    assert take(unshuffled, 29) == subset(0, 1)


@pytest.mark.parametrize(
    ("size", "ratio", "message"),
    [
        (10, 0.0, r"subset_ratio must be in \(0, 1\], got 0.0"),
        (10, 1.1, r"subset_ratio must be in \(0, 1\], got 1.1"),
        (10, 0.01, "subset_ratio 0.01 of 10 samples leaves none"),
        (0, 0.5, "size must be >= 1 sample, got 0"),
    ],
)
def test_a_subset_that_cannot_be_drawn_is_refused(size, ratio, message):
    with pytest.raises(ValueError, match=message):
        RandomSubsetTrainingSampler(size, ratio)


def test_samples_are_repeated_as_often_as_their_factors_say():
    sampler = RepeatFactorTrainingSampler([1.0, 2.5, 0.0, 0.25], shuffle=False, seed=0)
    epochs = [sampler.epoch_indices(epoch).tolist() for epoch in range(500)]

    assert {tuple(epoch) for epoch in epochs} == {(0, 1, 1), (0, 1, 1, 1), (0, 1, 1, 3), (0, 1, 1, 1, 3)}
    assert sum(epoch.count(1) for epoch in epochs) / 500 == pytest.approx(2.5, abs=0.08)
    assert sum(epoch.count(3) for epoch in epochs) / 500 == pytest.approx(0.25, abs=0.08)


@pytest.mark.parametrize("factors", [[], [0.0, 0.0], [1.0, -0.5], [1.0, math.nan], [[1.0]], [math.inf]])
def test_repeat_factors_that_make_no_stream_are_refused(factors):
    with pytest.raises(ValueError, match="repeat_factors must be a non-empty vector of finite values >= 0"):
        RepeatFactorTrainingSampler(factors)


def test_repeat_factors_follow_the_rarest_category_of_a_sample():
    # frequencies: "a" 4/8, "b" 1/8, "c" 2/8; with t = 0.5 the ratios t / f are 1, 4 and 2
    samples = [["a"], ["a", "a"], ["a", "b"], ["a", "c"], ["c"], [], (), set()]
    factors = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency

    assert factors(samples, 0.5).tolist() == pytest.approx([1, 1, 2, 2**0.5, 2**0.5, 1, 1, 1])
    assert factors(samples, 0.5, sqrt=False).tolist() == [1, 1, 4, 2, 2, 1, 1, 1]
    assert factors(samples, 0.0).tolist() == [1] * 8
    with pytest.raises(ValueError, match=r"repeat_thresh must be >= 0, got -0.1"):
        factors(samples, -0.1)


def test_repeat_factors_of_detectron2s_dicts_are_those_of_their_categories():
    factors = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency
    categories = [[0], [0, 0], [0, 1], [0, 2], [2], [], [], []]
    dicts = [{"file_name": "a", "annotations": [{"category_id": c} for c in sample]} for sample in categories]
    assert factors(dicts, 0.5).tolist() == pytest.approx([1, 1, 2, 2**0.5, 2**0.5, 1, 1, 1])
    assert torch.equal(factors(dicts, 0.5), factors(categories, 0.5))


@pytest.mark.parametrize(
    "sample",
    [
        {"file_name": "a"},
        {"annotations": [{"bbox": [0, 0, 1, 1]}]},
        {"annotations": 3},
        [{"category_id": 0}],
        "cat",
        torch.tensor([0, 1]),
        7,
    ],
    ids=str,
)
def test_a_sample_that_is_neither_form_is_an_error_that_shows_it(sample):
    with pytest.raises(TypeError, match="sample 1 of dataset_dicts must be its categories, such as") as caught:
        RepeatFactorTrainingSampler.repeat_factors_from_category_frequency([[0], sample], 0.5)
    assert repr(sample) in str(caught.value)


@pytest.mark.parametrize(
    ("size", "shares"),
    [(9, [[0, 1, 2], [3, 4], [5, 6], [7, 8]]), (2, [[0], [1], [], []]), (4, [[0], [1], [2], [3]])],
)
def test_inference_divides_the_samples_into_contiguous_shares(size, shares, as_rank):
    for rank, share in enumerate(shares):
        as_rank(rank, 4)
        sampler = InferenceSampler(size)
        assert [*sampler] == share
        assert len(sampler) == len(share)


@pytest.mark.parametrize("sampler", [InferenceSampler, TrainingSampler])
def test_an_empty_dataset_is_refused(sampler):
    with pytest.raises(ValueError, match="size must be >= 1 sample, got 0"):
        sampler(0)


def test_grouped_batches_hold_one_group_and_come_as_they_fill():
    groups = [0, 1, 0, 1, 1, 0, 0]
    batches = GroupedBatchSampler(SequentialSampler(groups), groups, batch_size=2)
    assert [*batches] == [[0, 2], [1, 3], [5, 6]]  # sample 4 has no partner

    endless = GroupedBatchSampler(TrainingSampler(7, shuffle=False), torch.tensor(groups), batch_size=2)
    assert take(endless, 6) == [[0, 2], [1, 3], [5, 6], [4, 1], [0, 2], [3, 4]]


def test_grouped_batches_go_on_from_a_state_of_larger_ones_at_their_own_size_and_lose_nothing():
    groups = [0, 1, 0, 1, 0, 1, 0]
    large = GroupedBatchSampler(TrainingSampler(7, shuffle=False), groups, batch_size=4)
    assert next(iter(large)) == [0, 2, 4, 6]
    state = large.state_dict()
    assert state["open"] == {1: [1, 3, 5]}

    small = GroupedBatchSampler(TrainingSampler(7, shuffle=False), groups, batch_size=2)
    small.load_state_dict(state)
    assert take(small, 6) == [[1, 3], [0, 2], [5, 1], [3, 5], [4, 6], [0, 2]]


def test_grouped_batches_refuse_what_they_cannot_group():
    with pytest.raises(TypeError, match="Sampler, got list"):
        GroupedBatchSampler([0], [0], 1)
    with pytest.raises(ValueError, match="batch_size must be >= 1 sample, got 0"):
        GroupedBatchSampler(TrainingSampler(1), [0], 0)
    with pytest.raises(ValueError, match=r"group_ids must be a vector .* got shape \(1, 1\)"):
        GroupedBatchSampler(TrainingSampler(1), [[0]], 1)


def test_short_epochs_go_on_with_the_subset_of_their_state():
    one, other = (LimitedSampler(RandomSubsetTrainingSampler(50, 0.5), 7) for _ in range(2))
    assert take(one, 30) != take(other, 30)
    other.load_state_dict(one.state_dict(10))
    assert take(other, 20) == take(one, 30)[10:]
