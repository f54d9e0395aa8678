"""The trainer of the README, which divides each block among the two ranks of a group."""

import pytest
import torch
from trainkit.projects.sharding.tests.sharded_job import (
    Blocks,
    assert_close,
    assert_same_bits,
    from_middle_of,
    job,
    outcome,
)

from tests.docs.pages import blocks, run
from tests.engine.tiny import AfterStep, scalars
from tests.two_ranks import SLOW, on_two_ranks
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils import comm


@MODEL_REGISTRY.register()
class Tied(Blocks):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.blocks[1].up.weight = self.blocks[0].up.weight


(PAGE,) = blocks("projects/sharding/README.md", "python")
Trainer = run(PAGE, "projects/sharding/README.md")["Trainer"]


def cfg_of(folder, *options):
    """As in sharded_job.py, with one evaluation at the end, in batches of two samples."""
    options = ["MODEL.TENSOR_PARALLEL", 2, "CHECKPOINT.ASYNC", True, *options]
    cfg = job(folder, *options, "TEST.EVAL_PERIOD", 0, "CHECKPOINT.SAVE_LAST", False)
    cfg.TEST.IMS_PER_BATCH, cfg.HOOKS = 2, [{"NAME": "EMAHook", "DECAY": 0.5}]
    return cfg


def train(folder, *options, resume=False, until=None):
    torch.manual_seed(100 + comm.get_rank())  # other weights on each rank
    trainer = Trainer(cfg_of(folder, *options))
    seen = []
    trainer.register_hooks(
        [AfterStep(lambda trainer: seen.append((trainer.batch, trainer.losses["drawn"])))]
    )
    trainer.resume_or_load(resume=resume)
    trainer.train(max_iter=until)
    found = outcome(trainer)
    found["results"]["drawn"] = scalars(trainer)["drawn"]
    found["batches"], found["drawn"] = zip(*seen, strict=True)
    if comm.get_world_size() > 1:
        found["shares"] = {
            part.to_local().numel() / part.numel() for part in trainer.model.parameters()
        }
    return found


# ---------------------------------------------------------------------- on each rank


def whole(rank, folder):
    return train(f"{folder}/whole{comm.get_world_size()}")


def resumed(rank, folder):
    num = comm.get_world_size()
    return train(from_middle_of(folder, f"whole{num}", f"resumed{num}"), resume=True)


def of_four(rank, folder):
    return train(from_middle_of(folder, "whole4", "of_four"), resume=True)


def undivided(rank, folder):
    return train(
        from_middle_of(folder, "whole2", "undivided"), "MODEL.TENSOR_PARALLEL", 1, resume=True
    )


def from_the_meta_device(rank, folder):
    return train(f"{folder}/meta", "MODEL.FSDP.META_INIT", True, until=2)


def refused(rank, folder):
    tied = "blocks.0.up.weight = blocks.1.up.weight: one parameter became several"
    for trainer, message, *options in (
        (DefaultTrainer, "no parameter"),
        (Trainer, tied, "MODEL.NAME", "Tied"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer(cfg_of(f"{folder}/refused", *options))


# ---------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module", params=SLOW)
def four(folder):
    return on_two_ranks([whole, resumed], folder, num_ranks=4)


@pytest.fixture(scope="module", params=SLOW)
def two(four, folder):
    return on_two_ranks([whole, resumed, of_four, undivided, from_the_meta_device, refused], folder)


@pytest.fixture(scope="module")
def alone(two, folder):
    """The same job in one process, where nothing is divided."""
    return train(folder / "alone")


def test_losses_weights_and_results_are_those_of_one_process(four, two, alone):
    for by_rank in (four, two):
        found = by_rank["whole"][0]
        for rank in by_rank["whole"]:
            assert_same_bits(
                {**rank, "norms": {}, "results": {}}, {**found, "norms": {}, "results": {}}
            )
        assert_close(found, alone)
        assert found["norms"] == [
            (pytest.approx(norm, abs=1e-5), iter) for norm, iter in alone["norms"]
        ]
        for name in ("classification/top1", "loss/total_loss"):
            expected = [
                (pytest.approx(value, abs=1e-4), iter) for value, iter in alone["results"][name]
            ]
            assert found["results"][name] == expected


def test_a_group_has_one_batch_and_the_same_random_numbers_and_groups_have_different_ones(
    four, two
):
    zero, one = two["whole"]
    a, b, c, d = four["whole"]
    for key in ("batches", "drawn"):
        torch.testing.assert_close(
            [zero[key], a[key], c[key]], [one[key], b[key], d[key]], atol=0, rtol=0
        )
    for whole, *parts in zip(zero["batches"], a["batches"], c["batches"], strict=True):
        dealt = torch.stack([part["x"] for part in parts], 1).flatten(0, 1)
        torch.testing.assert_close(dealt, whole["x"], atol=0, rtol=0)
    assert a["drawn"] != c["drawn"]


def test_a_rank_holds_half_of_a_divided_matrix_and_all_of_what_the_plan_does_not_name(four, two):
    assert [rank["shares"] for rank in two["whole"]] == [{0.5, 1}] * 2
    assert {min(rank["shares"]) for rank in four["whole"]} == {0.2, 0.25}


def test_a_resumed_run_ends_with_the_same_bits(four, two):
    for by_rank in (four, two):
        for found, expected in zip(by_rank["resumed"], by_rank["whole"], strict=True):
            assert_same_bits(found, expected)


def test_other_numbers_of_ranks_go_on(two, alone, folder):
    found, other = two["of_four"]
    assert_close(found, alone)
    assert found["drawn"] == other["drawn"]
    assert_close(train(from_middle_of(folder, "whole2", "by_one"), resume=True), alone)
    found, other = two["undivided"]
    assert_close(found, alone)
    assert found["drawn"] != other["drawn"]


def test_a_model_from_the_meta_device_is_the_same_and_what_cannot_be_divided_is_refused(two):
    assert two["from_the_meta_device"][0]["losses"] == two["whole"][0]["losses"][:2]
    assert two["refused"] == [None, None]
