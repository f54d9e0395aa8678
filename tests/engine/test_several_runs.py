"""Several runs in one process: each has its own values, hooks and folder."""

import json
import logging
import threading
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep, Steps, Weight, metrics_by_worker, scalars, sgd
from trainkit.engine import DefaultTrainer, default_setup
from trainkit.engine.amp import AMPTrainer, fixed_scaler
from trainkit.engine.hooks import CallbackHook, EvalHook, PeriodicWriter
from trainkit.engine.step import SimpleTrainer
from trainkit.evaluation import DatasetEvaluator, inference_on_dataset, observe_inference
from trainkit.evaluation.observer import InferenceObserver
from trainkit.utils.events import EventStorage, EventWriter, get_event_storage, has_event_storage

PATIENCE_SEC = 60  # for a thread that waits for another one; reached only if a test fails


def in_threads(*calls):
    """What the calls return; they run at the same time, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(PATIENCE_SEC) for future in futures]


class Noting(EventWriter):
    """Written as for detectron2: it asks for the open storage."""

    def __init__(self):
        self.rows = []

    def write(self):
        latest = get_event_storage().latest()
        self.rows.append({name: latest[name][0] for name in ("total_loss", "seen", "score")})


def run_of(number, together, *, trainer_class=SimpleTrainer, **kwargs):
    """A run whose values are all ``number``; it waits for the other run before and after each step."""

    def compute(weight, batch):
        get_event_storage().put_scalar("seen", batch.item())
        return {"loss": weight * batch, "twice": 2 * weight * batch}

    model, writer = Weight(compute), Noting()
    trainer = trainer_class(model, [torch.tensor(number)], sgd(model, lr=0.0), **kwargs)
    wait = CallbackHook(
        before_step=lambda trainer: together.wait(PATIENCE_SEC),
        after_step=lambda trainer: together.wait(PATIENCE_SEC),
    )
    evaluation = EvalHook(1, lambda: {"score": number}, eval_after_train=False)
    trainer.register_hooks([wait, evaluation, PeriodicWriter([writer], period=1)])
    trainer.train(0, 5)
    return scalars(trainer), writer.rows


@pytest.mark.parametrize("kwargs", [{}, {"async_write_metrics": True}])
@pytest.mark.parametrize("is_late", [False, True])
def test_two_trainers_in_two_threads_store_and_write_their_own_values(kwargs, is_late):
    together = threading.Barrier(2)
    numbers = [1.0, 2.0]
    with metrics_by_worker() if is_late else nullcontext():
        found = in_threads(*[lambda n=n: run_of(n, together, **kwargs) for n in numbers])
    for number, (stored, rows) in zip(numbers, found, strict=True):
        each = [(number, iter) for iter in range(5)]
        assert stored == {
            "seen": each,
            "loss": each,
            "twice": [(2 * value, iter) for value, iter in each],
            "total_loss": [(3 * value, iter) for value, iter in each],
            "score": each,
        }
        # the fifth row, and the sixth at the end of the run
        assert rows == [{"total_loss": 3 * number, "seen": number, "score": number}] * 6
    assert not has_event_storage()


def test_the_scale_and_the_skipped_updates_of_a_run_are_its_own():
    together = threading.Barrier(2)

    def run(scale):
        scaler = fixed_scaler("cpu", scale)
        options = {"grad_scaler": scaler, "log_grad_scaler": True, "trainer_class": AMPTrainer}
        return run_of(1.0, together, **options)[0]

    for scale, stored in zip(
        (2.0, 8.0), in_threads(lambda: run(2.0), lambda: run(8.0)), strict=True
    ):
        assert stored["[metric]grad_scaler"] == [(scale, iter) for iter in range(5)]
        assert stored["skipped_updates"] == [(0.0, iter) for iter in range(5)]


def test_a_storage_that_the_main_thread_opens_later_gets_nothing_from_a_trainer_in_a_thread():
    together = threading.Barrier(2)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(run_of, 3.0, together)
        together.wait(PATIENCE_SEC)  # before step 0
        with EventStorage() as storage:
            for _ in range(9):
                together.wait(PATIENCE_SEC)
            stored, rows = run.result(PATIENCE_SEC)
            assert get_event_storage() is storage
    assert storage.latest() == {}
    assert (stored["seen"][-1], len(rows)) == ((3.0, 4), 6)


def test_a_thread_without_a_storage_sees_the_only_open_one_and_asks_for_its_own_if_there_are_several():
    def ask():
        return get_event_storage()

    assert in_threads(has_event_storage) == [False]
    with EventStorage() as outer:
        assert in_threads(ask, has_event_storage) == [outer, True]
        with EventStorage() as inner:
            assert in_threads(ask) == [inner]
            with outer:  # the same once more
                assert in_threads(ask) == [outer]
            assert (in_threads(ask), get_event_storage()) == ([inner], inner)
        assert in_threads(ask) == [outer]

        def in_another(do):
            with EventStorage() as own:
                assert get_event_storage() is own
                return in_threads(do)[0]

        with pytest.raises(
            RuntimeError, match=r"opened no EventStorage, and 2 are open .*storage:`"
        ):
            in_threads(lambda: in_another(ask))
        assert in_threads(lambda: in_another(has_event_storage)) == [True]

        def with_the_same():
            with outer:
                return in_threads(ask)[0]

        assert in_threads(with_the_same) == [outer]
        assert outer.is_open
    assert not outer.is_open


def test_what_a_worker_has_open_is_not_seen_by_other_threads():
    started, go = threading.Event(), threading.Event()
    with EventStorage() as storage:
        storage.start_worker()
        storage.publish(lambda: (started.set(), go.wait(PATIENCE_SEC)))
        started.wait(PATIENCE_SEC)
        assert in_threads(get_event_storage) == [storage]
        go.set()


def test_a_worker_lives_until_the_last_block_of_its_storage_is_closed():
    with EventStorage() as storage:
        worker = storage.start_worker()
        with storage:
            storage.put_scalar("a", 1.0)
        assert storage.worker is worker
    assert (storage.worker, storage.latest()) == (None, {"a": (1.0, 0)})


def test_trainers_that_step_by_turns_in_one_thread_keep_their_values_apart():
    """A loop of one's own, as of a teacher and a student; whichever storage was opened last."""
    trainers = []
    for number in (1.0, 2.0):
        model = Weight()
        options = {"grad_scaler": fixed_scaler("cpu", number), "log_grad_scaler": True}
        trainers.append(AMPTrainer(model, [torch.tensor(number)], sgd(model, lr=0.0), **options))
    first, second = trainers
    with first.storage, second.storage:
        for iter in range(3):
            for trainer in trainers:
                trainer.iter = trainer.storage.iter = iter
                trainer.run_step()
    for number, trainer in zip((1.0, 2.0), trainers, strict=True):
        for name in ("total_loss", "[metric]grad_scaler"):
            assert trainer.storage.history(name).values() == [(number, iter) for iter in range(3)]


def test_a_loop_as_in_detectron2_that_opens_a_storage_of_its_own_finds_the_losses_there():
    model = Weight()
    trainer = SimpleTrainer(model, [torch.tensor(2.0)], sgd(model, lr=0.0))
    with EventStorage() as storage:
        for trainer.iter in range(3):
            trainer.run_step()
            storage.step()
    assert storage.history("total_loss").values() == [(2.0, iter) for iter in range(3)]
    assert trainer.storage.latest() == {}


def test_a_writer_is_called_with_the_storage_of_its_run_whatever_else_is_open():
    writer, seen = Noting(), []
    writer.write = lambda: seen.append(get_event_storage())

    def act(trainer):
        with EventStorage():
            trainer.storage.publish(writer.write)

    trainer = Steps([AfterStep(act)])
    trainer.train(0, 2)
    assert seen == [trainer.storage] * 2


def test_evaluations_in_two_threads_are_observed_each_by_its_own_trainer():
    together = threading.Barrier(2)

    class Noting(InferenceObserver):
        def __init__(self):
            self.names = []

        def before_eval_step(self, phase, index, inputs):
            self.names.append((phase, inputs))

    def evaluate(phase, data):
        observer = Noting()
        with observe_inference(observer, phase):
            together.wait(PATIENCE_SEC)
            inference_on_dataset(
                lambda batch: together.wait(PATIENCE_SEC), data, DatasetEvaluator()
            )
        return observer.names

    assert in_threads(lambda: evaluate("val", "ab"), lambda: evaluate("test", "cd")) == [
        [("val", "a"), ("val", "b")],
        [("test", "c"), ("test", "d")],
    ]


def test_jobs_in_two_threads_write_their_own_folders_and_say_that_they_share_random_numbers(
    tmp_path, caplog
):
    together = threading.Barrier(2)

    def train(name, lr):
        cfg = tiny_cfg(tmp_path / name, "SOLVER.BASE_LR", lr, "SOLVER.WARMUP_ITERS", 0)
        cfg.SOLVER.STEPS = ()
        trainer = DefaultTrainer(cfg)

        def wait(trainer):
            together.wait(PATIENCE_SEC)

        trainer.register_hooks([CallbackHook(before_train=wait, before_step=wait)])
        trainer.train()
        lines = (tmp_path / name / "metrics.json").read_text().splitlines()
        return [json.loads(line) for line in lines]

    with caplog.at_level(logging.WARNING):
        found = in_threads(lambda: train("a", 0.125), lambda: train("b", 0.25))
    for lr, lines in zip((0.125, 0.25), found, strict=True):
        trained = [line for line in lines if "lr" in line]
        assert [line["iteration"] for line in trained] == [1, 3, 4, 5, 7, 9]
        assert {line["lr"] for line in trained} == {lr}
    assert any("another thread of this process trains too" in text for text in caplog.messages)


def test_a_second_job_says_in_both_files_that_it_takes_over_the_log(tmp_path):
    for name in ("a", "b", "b"):
        default_setup(tiny_cfg(tmp_path / name), Namespace())
    logs = [(tmp_path / name).read_text() for name in ("a/log.txt", "b/previous_1/log.txt")]
    assert f"A job in {tmp_path / 'b'} takes over the log of this process" in logs[0]
    assert f"takes over the log of this process, which was {tmp_path / 'a' / 'log.txt'}" in logs[1]
    assert "takes over" not in (tmp_path / "b/log.txt").read_text()
