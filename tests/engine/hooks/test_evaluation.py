import pytest
import torch

from tests.engine.tiny import AfterStep, Steps, Weight, fail_at, sgd
from trainkit.engine.hooks import EvalHook
from trainkit.engine.step import SimpleTrainer


def evaluations(period, max_iter, start_iter=0, step=lambda iter: None, **kwargs):
    """After how many iterations each evaluation took place, and the trainer."""
    found = []
    trainer = Steps(step=step)
    trainer.register_hooks([EvalHook(period, lambda: found.append(done(trainer)), **kwargs)])
    trainer.train(start_iter, max_iter)
    return found


def done(trainer):
    return trainer.iter + (trainer.status == "running")  # within after_step the current iteration is done


@pytest.mark.parametrize(
    ("max_iter", "period", "expected"),
    [(30, 15, [15, 30]), (31, 15, [15, 30, 31]), (20, 0, [20]), (3, 1, [1, 2, 3]), (3, 5, [3])],
)
def test_it_evaluates_every_period_and_at_the_end_and_never_twice(max_iter, period, expected):
    assert evaluations(period, max_iter) == expected


def test_without_evaluation_at_the_end_the_last_iteration_has_its_turn_by_the_period():
    assert evaluations(5, 10, eval_after_train=False) == [5, 10]
    assert evaluations(5, 11, eval_after_train=False) == [5, 10]
    assert evaluations(0, 11, eval_after_train=False) == []


def test_at_start_it_evaluates_before_the_first_iteration_of_a_fresh_run():
    found = []
    trainer = Steps()
    trainer.register_hooks([EvalHook(0, lambda: found.append(trainer.iter), eval_at_start=True)])
    trainer.train(0, 4)
    assert found == [0, 4]
    trainer.train(2, 4)
    assert found == [0, 4, 4]


@pytest.mark.parametrize("period", [0, 1, 3])
def test_a_failure_in_the_last_iteration_is_followed_by_no_evaluation(period):
    trainer = Steps(step=fail_at(5))
    found = []
    trainer.register_hooks([EvalHook(period, lambda: found.append(trainer.iter))])
    with pytest.raises(RuntimeError, match="step 5 failed"):
        trainer.train(0, 6)
    assert (trainer.iter, trainer.status) == (5, "failed")
    assert found == {0: [], 1: [0, 1, 2, 3, 4], 3: [2]}[period]


def test_a_stopped_run_is_not_evaluated_and_an_early_finished_one_once():
    for finished, expected in ((False, [4]), (True, [4])):
        trainer = Steps()
        found = []
        trainer.register_hooks(
            [
                EvalHook(4, lambda found=found, trainer=trainer: found.append(done(trainer))),
                AfterStep(lambda trainer, how=finished: trainer.iter == 3 and stop(trainer, how)),
            ]
        )
        trainer.train(0, 10)
        assert found == expected
        assert trainer.status == ("finished" if finished else "stopped")
    trainer = Steps()
    trainer.register_hooks([EvalHook(4, lambda: found.append("end")), AfterStep(lambda trainer: stop(trainer, True))])
    found.clear()
    trainer.train(0, 10)
    assert found == ["end"]


def stop(trainer, finished):
    trainer.request_stop("enough", finished=finished)


def test_a_second_run_evaluates_again():
    found = []
    trainer = Steps()
    trainer.register_hooks([EvalHook(2, lambda: found.append(done(trainer)))])
    trainer.train(0, 4)
    trainer.train(0, 4)
    trainer.train(4, 6)
    assert found == [2, 4, 2, 4, 6]


def test_results_are_stored_flat_and_not_smoothed():
    trainer = Steps([EvalHook(3, lambda: {"cls": {"top1": 50, "top5": torch.tensor(90.5)}, "loss": 0.25})])
    trainer.train(0, 6)
    assert {name: history.values() for name, history in trainer.storage.histories().items()} == {
        "cls/top1": [(50.0, 2), (50.0, 6)],
        "cls/top5": [(90.5, 2), (90.5, 6)],
        "loss": [(0.25, 2), (0.25, 6)],
    }
    assert set(trainer.storage.smoothing_hints().values()) == {False}


@pytest.mark.parametrize("leaf", ["good", None, [1.0], torch.ones(2)])
def test_a_leaf_that_is_no_number_is_an_error_with_its_name(leaf):
    trainer = Steps([EvalHook(0, lambda: {"cls": {"top1": leaf}})])
    with pytest.raises(ValueError, match="result 'cls/top1' must be a number"):
        trainer.train(0, 1)
    assert trainer.status == "failed"


@pytest.mark.usefixtures("worker")
def test_a_loss_that_is_not_finite_is_found_before_the_evaluation_also_asynchronously():
    evaluated = []
    model = Weight()
    data = [torch.tensor(1.0), torch.tensor(float("nan"))]
    trainer = SimpleTrainer(model, data, sgd(model), async_write_metrics=True)
    trainer.register_hooks([EvalHook(2, lambda: evaluated.append(1))])
    with pytest.raises(FloatingPointError, match="in iteration 1"):
        trainer.train(0, 4)
    assert evaluated == []


class Epochs(Steps):
    iters_per_epoch = 3


def epochs_of_results(trainer, max_iter):
    """(iteration, epoch) of each evaluation as it is stored."""
    found = []

    def note():
        if "top1" in trainer.storage.latest():
            place = (trainer.storage.latest()["top1"][1], trainer.storage.epochs().get("top1"))
            found.extend([place] * (place not in found))

    trainer.register_hooks([AfterStep(lambda trainer: note())])
    trainer.train(0, max_iter)
    note()
    return found


def test_by_epoch_results_are_stored_with_the_whole_epochs_done():
    def trainer(**kwargs):
        return Epochs([EvalHook(2, lambda: {"top1": 50.0}, **kwargs)])

    assert epochs_of_results(trainer(by_epoch=True, eval_at_start=True), 7) == [(0, 0), (1, 0), (3, 1), (5, 2), (7, 2)]
    assert epochs_of_results(trainer(), 7) == [(1, None), (3, None), (5, None), (7, None)]


def test_by_epoch_without_epochs_is_an_error_before_the_first_iteration():
    calls = []
    with pytest.raises(ValueError, match=r"EvalHook has by_epoch \(LOG\.EVAL_AXIS in a config\), but .* no epochs"):
        Steps([EvalHook(1, dict, by_epoch=True)], step=calls.append).train(0, 1)
    assert calls == []
