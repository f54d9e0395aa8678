import numpy as np
import pytest
import torch

from tests.engine.tiny import Steps, fail_at, stop_at
from trainkit.engine.hooks import EvalHook


def make(period, step=lambda iter: None, **kwargs):
    """A trainer, and after how many iterations each evaluation took place; an evaluation draws a number."""
    found, trainer = [], Steps(step=step)
    evaluate = EvalHook(
        period, lambda: found.append(trainer.done - 1 + len(torch.rand(1))), **kwargs
    )
    trainer.register_hooks([evaluate])
    return trainer, found


@pytest.mark.parametrize(
    ("max_iter", "period", "after_train", "expected"),
    [
        (31, 15, True, [15, 30, 31]),
        (30, 15, True, [15, 30]),
        (20, 0, True, [20]),
        (11, 5, False, [5, 10]),
    ],
)
def test_it_evaluates_every_period_and_at_the_end_and_never_twice(
    max_iter, period, after_train, expected
):
    trainer, found = make(period, eval_after_train=after_train)
    trainer.train(0, max_iter)
    assert found == expected
    trainer.train(0, max_iter)
    assert found == 2 * expected


def test_at_start_it_evaluates_before_the_first_iteration_of_a_new_run_and_leaves_random_states():
    (trainer, found), before = make(0, eval_at_start=True), torch.get_rng_state()
    trainer.train(0, 4)
    trainer.train(2, 4)
    assert found == [0, 4, 4]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("period", [0, 1])
def test_a_failure_in_the_last_iteration_is_followed_by_no_evaluation(period):
    trainer, found = make(period, step=fail_at(5))
    with pytest.raises(RuntimeError, match="step 5 failed"):
        trainer.train(0, 6)
    assert trainer.iter == 5
    assert trainer.status == "failed"
    assert found == {0: [], 1: [1, 2, 3, 4, 5]}[period]


@pytest.mark.parametrize(
    ("at", "finished", "evaluated"),
    [
        (3, False, [4]),  # the evaluation that is due
        (3, True, [4]),
        (0, True, [1]),
    ],
)
def test_a_stopped_run_is_not_evaluated_and_one_that_finishes_early_once(at, finished, evaluated):
    trainer, found = make(4)
    trainer.register_hooks([stop_at(at, finished=finished)])
    trainer.train(0, 10)
    assert found == evaluated


def test_results_are_stored_flat_and_not_smoothed_and_must_be_numbers():
    trainer = Steps(
        [
            EvalHook(
                3,
                lambda: {
                    "cls": {"top1": 50, "top5": torch.tensor(90.5)},
                    "loss": np.array([0.25]),
                    "psnr": torch.tensor([[7.5]]),
                },
            )
        ]
    )
    trainer.train(0, 6)
    assert {name: history.values() for name, history in trainer.storage.histories().items()} == {
        "cls/top1": [(50.0, 2), (50.0, 6)],
        "cls/top5": [(90.5, 2), (90.5, 6)],
        "loss": [(0.25, 2), (0.25, 6)],
        "psnr": [(7.5, 2), (7.5, 6)],
    }
    assert set(trainer.storage.smoothing_hints().values()) == {False}
    for leaf in ("good", None, torch.ones(2), np.ones(2), np.ones((1, 0)), [5.0]):
        with pytest.raises(ValueError, match="result 'cls/top1' must be a number"):
            Steps([EvalHook(0, lambda leaf=leaf: {"cls": {"top1": leaf}})]).train(0, 1)


def test_the_line_of_an_evaluation_says_how_many_results_it_leaves_out(caplog):
    caplog.set_level("INFO")
    results = {f"score{number}": float(number) for number in range(8)}
    Steps([EvalHook(2, lambda: results)]).train(0, 3)
    during, last = [text for text in caplog.messages if text.startswith("Evaluated after")]
    assert during.startswith("Evaluated after 2 of 3")
    assert last.startswith("Evaluated after 3 of 3")
    assert during.endswith("score5: 5  (2 more in the files)")
