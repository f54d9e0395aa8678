"""The samplers do what those of the core do, and each does its own."""

import math

import numpy as np
import pytest
import torch
from torch.utils.data import SequentialSampler
from trainkit.projects.samplers.parts import LimitedSampler

from tests.data import test_epochs, test_loader, test_samplers
from tests.data.test_build import Squares, cfg, indices  # noqa: F401
from tests.data.test_loader import SIZE
from tests.data.test_samplers import take
from trainkit.data import (
    GroupedBatchSampler,
    RandomSubsetTrainingSampler,
    RepeatFactorTrainingSampler,
    ResumableLoader,
    TrainingSampler,
    build_train_loader,
    resume_obstacle,
)

# a machine with few cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

GROUPS = [0, 1, 2] * 3 + [0, 1]
INFINITE = {
    "subset": lambda seed: RandomSubsetTrainingSampler(
        20, 0.4, seed_shuffle=seed, seed_subset=seed
    ),
    "repeat_factor": lambda seed: RepeatFactorTrainingSampler(
        [1.5, 0.25, 3.0, 1.0, 0.5, 2.0, 1.0], seed=seed
    ),
    "repeated": lambda seed: LimitedSampler(TrainingSampler(30, seed=seed), 7, repeat_first=True),
    "limited": lambda seed: LimitedSampler(
        RepeatFactorTrainingSampler([1.5, 1.0, 3.0, 2.5] * 3, seed=seed), 7
    ),
}
ORDERS = {
    "subset": lambda seed: {
        "sampler": RandomSubsetTrainingSampler(SIZE, 0.5, seed_shuffle=seed, seed_subset=seed)
    },
    "limited": lambda seed: {"sampler": LimitedSampler(TrainingSampler(SIZE, seed=seed), 7)},
    "repeat": lambda seed: {
        "sampler": RepeatFactorTrainingSampler([0.5, 1.5] * 5 + [1.0], seed=seed)
    },
    "grouped": lambda seed: {
        "batch_sampler": GroupedBatchSampler(TrainingSampler(SIZE, seed=seed), GROUPS, 4)
    },
}


@pytest.fixture(autouse=True)
def known_to_the_tests_of_the_core(monkeypatch):
    monkeypatch.setattr(test_samplers, "INFINITE", INFINITE)
    monkeypatch.setattr(test_loader, "ORDERS", {**test_loader.ORDERS, **ORDERS})


@pytest.mark.parametrize("name", INFINITE)
def test_a_stream_is_a_function_of_seed_and_epoch_that_can_be_entered_anywhere(name, as_rank):
    test_samplers.test_an_epoch_is_a_function_of_seed_and_epoch_alone_and_the_stream_is_all_of_them(
        name
    )
    for position in (0, 1, 12, 37):
        as_rank(0, 1)
        test_samplers.test_from_any_position_the_ranks_together_draw_the_stream_of_a_single_rank(
            name, position, 3, as_rank
        )


@pytest.mark.parametrize("order", ORDERS)
def test_a_loader_resumes_exactly_with_any_number_of_workers(order):
    test_loader.test_a_resumed_loader_delivers_what_the_uninterrupted_one_would_have(
        order, {"num_workers": 2, "prefetch_factor": 3}, {"num_workers": 0}
    )
    test_loader.test_a_position_can_be_asked_for_and_loaded_at_any_time(order)


def test_another_number_of_ranks_goes_on_with_the_same_global_batches(as_rank):
    test_loader.test_another_number_of_ranks_goes_on_with_the_same_global_batches("repeat", as_rank)


def test_going_on_costs_the_same_everywhere():
    class Recording(RepeatFactorTrainingSampler):
        def epoch_indices(self, epoch):
            epochs.append(epoch)
            return super().epoch_indices(epoch)

    epochs, place = [], {"position": 10**12, "epoch": 7, "offset": 1}
    sampler = Recording([0.5, 1.5, 2.0], seed=3)
    sampler.load_state_dict({"seed": 3, **place})
    assert take(sampler, 2) == sampler.epoch_indices(7)[1:3].tolist()
    assert {*epochs} == {7}
    assert sampler.state_dict() == {"seed": 3, **place}


def test_a_config_that_makes_no_sampler_says_why(cfg):  # noqa: F811
    cfg.DATALOADER.RANDOM_SUBSET_RATIO = 0.01
    for name, message in [
        ("RepeatFactorTrainingSampler", "needs categories: .* got .*index"),
        ("RandomSubsetTrainingSampler", "0.01 of 10 samples is 0; it must be 1 to 10"),
    ]:
        cfg.DATALOADER.SAMPLER_TRAIN = name
        with pytest.raises(ValueError, match=message):
            build_train_loader(cfg)


def test_a_subset_is_the_same_in_all_epochs_and_depends_on_its_own_seed():
    def subset(seed_shuffle, seed_subset, shuffle=True):
        return RandomSubsetTrainingSampler(
            100, 0.29, shuffle, seed_shuffle=seed_shuffle, seed_subset=seed_subset
        )

    sampler = subset(0, 1)
    epochs = [sampler.epoch_indices(epoch).tolist() for epoch in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == take(subset(7, 1, shuffle=False), 29)
    assert sampler.samples_per_epoch == len({*epochs[0]}) == 29
    assert sorted(epochs[0]) != take(subset(0, 2, shuffle=False), 29)


def test_samples_are_repeated_as_often_as_their_factors_say():
    sampler = RepeatFactorTrainingSampler([1.0, 2.5, 0.0, 0.25], shuffle=False, seed=0)
    epochs = [sampler.epoch_indices(epoch).tolist() for epoch in range(500)]
    assert {tuple(epoch) for epoch in epochs} == {
        (0, 1, 1),
        (0, 1, 1, 1),
        (0, 1, 1, 3),
        (0, 1, 1, 1, 3),
    }
    assert sum(epoch.count(1) for epoch in epochs) / 500 == pytest.approx(2.5, abs=0.08)
    assert sum(epoch.count(3) for epoch in epochs) / 500 == pytest.approx(0.25, abs=0.08)
    assert take(RepeatFactorTrainingSampler([1.0] * 9, seed=0), 9) != [*range(9)]


@pytest.mark.parametrize("factors", [[], [0.0, 0.0], [1.0, -0.5], [1.0, math.nan]])
def test_repeat_factors_that_make_no_stream_are_refused(factors):
    with pytest.raises(ValueError, match="repeat_factors must be finite, >= 0 and not all 0"):
        RepeatFactorTrainingSampler(factors)


def test_repeat_factors_follow_the_rarest_category_of_a_sample():
    # frequencies: "a" 4/8, "b" 1/8, "c" 2/8; with t = 0.5 the ratios t / f are 1, 4 and 2
    samples = [["a"], ["a", "a"], ["a", "b"], ["a", "c"], ["c"], [], (), set()]
    dicts = [{"annotations": [{"category_id": c} for c in sample]} for sample in samples]
    factors = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency
    assert factors(samples, 0.5).tolist() == pytest.approx([1, 1, 2, 2**0.5, 2**0.5, 1, 1, 1])
    assert factors(samples, 0.5, sqrt=False).tolist() == [1, 1, 4, 2, 2, 1, 1, 1]
    assert factors(samples, 0.0).tolist() == [1] * 8
    assert torch.equal(factors(dicts, 0.5), factors(samples, 0.5))


def test_grouped_batches_hold_one_group_and_come_as_they_fill():
    groups = [0, 1, 0, 1, 1, 0, 0]
    batches = GroupedBatchSampler(SequentialSampler(groups), groups, batch_size=2)
    loader = ResumableLoader([*range(7)], batch_sampler=batches)
    # sample 4 has no partner
    assert [batch.tolist() for batch in loader] == [*batches] == [[0, 2], [1, 3], [5, 6]]
    assert "GroupedBatchSampler has no position in a SequentialSampler" in resume_obstacle(loader)
    endless = GroupedBatchSampler(
        TrainingSampler(7, shuffle=False), torch.tensor(groups), batch_size=2
    )
    assert take(endless, 6) == [[0, 2], [1, 3], [5, 6], [4, 1], [0, 2], [3, 4]]


def test_the_epoch_of_a_grouped_batch_counts_the_samples_of_full_batches():
    groups = [0, 0, 0, 1]
    batches = GroupedBatchSampler(TrainingSampler(4, shuffle=False), groups, batch_size=3)
    loader = ResumableLoader(test_epochs.Told(4), batch_sampler=batches, collate_fn=list)
    # the second batch is drawn in epoch 1; its positions are 3, 4 and 5, since sample 3 still waits
    assert take(batches, 4) == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [3, 3, 3]]
    assert take(loader, 4) == [[0, 0, 0], [0, 1, 1], [1, 1, 2], [2, 2, 2]]


def test_short_epochs_continue_with_the_subset_of_their_state():
    one, other = (LimitedSampler(RandomSubsetTrainingSampler(50, 0.5), 7) for _ in range(2))
    assert take(one, 30) != take(other, 30)
    other.load_state_dict(one.state_dict(10))
    assert take(other, 20) == take(one, 30)[10:]


def test_grouped_batches_are_resumed_at_another_world_size_with_a_warning(as_rank, caplog):
    loader = test_loader.make("grouped")
    test_loader.take(loader, 1)
    as_rank(0, 2)
    resumed = test_loader.make("grouped")
    resumed.load_state_dict(loader.state_dict())
    assert "of 1 ranks cannot be divided among 2" in caplog.text
    assert resumed.state_dict()["position"] == 4


def test_rare_categories_are_repeated_whatever_holds_them(cfg):  # noqa: F811
    cfg.merge_from_other_cfg(
        {"DATALOADER": {"REPEAT_THRESHOLD": 0.75, "REPEAT_SQRT": False, "COLLATE": "list"}}
    )
    cfg.DATALOADER.SAMPLER_TRAIN = "RepeatFactorTrainingSampler"
    for key, values in [
        ("category", [["a"], ("b", "a"), {"a"}, "a"]),
        ("label", [0, torch.tensor([1, 0]), np.int64(0), [0]]),
    ]:
        sampler = build_train_loader(
            cfg, [{"index": i, key: value} for i, value in enumerate(values)]
        ).sampler
        # the rare one's frequency is 1/4
        assert sorted(sampler.epoch_indices(0).tolist()) == [
            0,
            1,
            1,
            1,
            2,
            3,
        ]
