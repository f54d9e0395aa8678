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
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer, default_setup
from trainkit.engine.amp import AMPTrainer, fixed_scaler
from trainkit.engine.hooks import CallbackHook, EvalHook, PeriodicWriter
from trainkit.engine.step import SimpleTrainer
from trainkit.evaluation import DatasetEvaluator, inference_on_dataset, observe_inference
from trainkit.evaluation.observer import InferenceObserver
from trainkit.utils.events import EventStorage, EventWriter, get_event_storage, has_event_storage
from trainkit.utils.run_folder import is_owned

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
    assert stored["seen"][-1] == (3.0, 4)
    assert len(rows) == 6


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
            assert in_threads(ask) == [inner]
            assert get_event_storage() == inner
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
    assert storage.worker is None
    assert storage.latest() == {"a": (1.0, 0)}


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


def test_a_second_job_says_that_it_takes_over_the_log_and_a_run_that_still_trains_is_told(tmp_path):
    for name in ("a", "b", "b"):
        default_setup(tiny_cfg(tmp_path / name), Namespace())
    logs = [(tmp_path / name).read_text() for name in ("a/log.txt", "b/previous_1/log.txt")]
    assert f"takes over the log of this process, which was {tmp_path / 'a' / 'log.txt'}" in logs[1]
    assert "takes over" not in logs[0]  # the folder of a run that has ended is left alone
    assert "takes over" not in (tmp_path / "b/log.txt").read_text()

    trainer = DefaultTrainer(tiny_cfg(tmp_path / "b"))
    other = tiny_cfg(tmp_path / "c")
    trainer.register_hooks(
        [AfterStep(lambda trainer: trainer.iter == 4 and default_setup(other, Namespace()))]
    )
    trainer.train()
    assert f"A job in {tmp_path / 'c'} takes over the log" in (tmp_path / "b/log.txt").read_text()


def plain_lr(folder, *options):
    return tiny_cfg(folder, "SOLVER.STEPS", (), *options)


def iterations(path):
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("key", ["OUTPUT_DIR", "CHECKPOINT.DIR"])
def test_a_trainer_in_a_hook_is_refused_the_folder_of_its_run_which_stays_locked(tmp_path, key):
    outer = DefaultTrainer(tiny_cfg(tmp_path / "run"))
    inner_cfg = tiny_cfg(tmp_path / "inner", key, str(tmp_path / "inner/../run"))
    inner = DefaultTrainer(inner_cfg)
    found = []

    def act(trainer):
        if trainer.iter not in (1, 2):
            return
        before = sorted(path.name for path in (tmp_path / "run").iterdir())
        for start in (inner.train, lambda: default_setup(inner_cfg, Namespace()), outer.train):
            with pytest.raises(ConfigError, match=r"belongs to another run of this process"):
                start()
        # a finished run, which only unlocks what `default_setup` locked
        inner.status = "finished"
        inner.max_iter = 0
        inner.train()
        inner.status = "not started"
        inner.max_iter = 10
        after = sorted(path.name for path in (tmp_path / "run").iterdir())
        assert after == before
        assert is_owned(tmp_path / "run")
        assert inner.status == "not started"
        found.append(trainer.iter)

    outer.register_hooks([AfterStep(act)])
    outer.train()
    assert found == [1, 2]
    assert outer.status == "finished"
    assert outer.iter == 10
    assert iterations(tmp_path / "run/metrics.json")[-1] == 10
    assert not is_owned(tmp_path / "run")
    inner.train()  # now it is free
    assert inner.status == "finished"


def test_of_two_threads_with_one_folder_one_trains_and_the_other_is_refused(tmp_path):
    together = threading.Barrier(2)

    def train():
        trainer = DefaultTrainer(tiny_cfg(tmp_path))
        trainer.register_hooks(
            [
                CallbackHook(
                    before_step=lambda trainer: trainer.iter == 3 and together.wait(PATIENCE_SEC)
                )
            ]
        )
        together.wait(PATIENCE_SEC)
        try:
            trainer.train()
        except ConfigError as error:
            assert is_owned(tmp_path)
            together.wait(PATIENCE_SEC)  # the other one goes on only now
            return str(error)
        return trainer.status

    found = in_threads(train, train)
    assert "finished" in found
    assert any("OUTPUT_DIR" in text and "another run of this process" in text for text in found)
    assert not is_owned(tmp_path)
    written = iterations(tmp_path / "metrics.json")
    assert written == sorted(set(written))


def test_a_second_new_run_moves_the_files_of_the_first_away_but_not_log_and_config(
    tmp_path, caplog
):
    cfg = tiny_cfg(tmp_path)
    default_setup(cfg, Namespace())
    DefaultTrainer(cfg).train()
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    second = DefaultTrainer(cfg)
    second.register_hooks([AfterStep(lambda trainer: trainer.iter == 2 and 1 / 0)])
    with pytest.raises(ZeroDivisionError):
        second.train()

    moved = {path.name: path.read_bytes() for path in (tmp_path / "previous_1").iterdir()}
    stayed = {name: moved.get(name, first[name]) for name in first}
    assert stayed == first
    assert first.keys() - moved.keys() == {"log.txt", "config.yaml"}
    assert iterations(tmp_path / "metrics.json") == [1, 2]
    third = DefaultTrainer(cfg)
    third.resume_or_load(resume=True)  # no file of the first run is taken
    assert third.start_iter == 0
    third.train()
    assert iterations(tmp_path / "previous_2/metrics.json") == [1, 2]
    assert iterations(tmp_path / "metrics.json") == iterations(tmp_path / "previous_1/metrics.json")
    assert "The files of an earlier run" in (tmp_path / "log.txt").read_text()


def test_the_folder_of_checkpoints_is_emptied_too_and_weights_in_it_are_an_error(tmp_path):
    options = "CHECKPOINT.DIR", str(tmp_path / "weights")
    DefaultTrainer(tiny_cfg(tmp_path / "run", *options)).train()
    before = sorted(path.name for path in (tmp_path / "weights").iterdir())
    weights = tmp_path / "weights/model_final.pth"
    tuned = DefaultTrainer(tiny_cfg(tmp_path / "run", *options, "MODEL.WEIGHTS", str(weights)))
    with pytest.raises(ConfigError, match=r"MODEL.WEIGHTS '.*' lies in .* move it"):
        tuned.train()
    assert not is_owned(tmp_path / "run")
    assert weights.exists()
    DefaultTrainer(tiny_cfg(tmp_path / "run", *options)).train()
    moved = sorted(path.name for path in (tmp_path / "weights/previous_1").iterdir())
    assert moved == before
    assert (tmp_path / "run/previous_1/metrics.json").exists()


def test_a_run_that_goes_on_in_this_process_goes_on_in_its_files(tmp_path):
    first = DefaultTrainer(plain_lr(tmp_path))
    first.register_hooks([AfterStep(lambda t: t.iter == 3 and t.request_stop("enough"))])
    first.train()
    first.train()  # a notebook
    first.train(max_iter=12)
    second = DefaultTrainer(plain_lr(tmp_path, "SOLVER.MAX_ITER", 14))
    second.resume_or_load(resume=True)
    second.train()
    third = DefaultTrainer(plain_lr(tmp_path, "SOLVER.MAX_ITER", 14))
    third.resume_or_load(resume=True)
    third.train(max_iter=16)  # it has finished, and goes on
    assert second.start_iter == 12
    assert third.iter == 16
    assert not [*tmp_path.glob("previous_*")]
    written = iterations(tmp_path / "metrics.json")
    assert written == sorted(set(written))
    assert written[-1] == 16


def test_a_run_that_starts_over_or_goes_on_after_another_one_does_not_mix_files(tmp_path):
    first, second = (DefaultTrainer(plain_lr(tmp_path)) for _ in range(2))
    first.train(0, 4)
    first.train(0, 6)  # again from the start
    second.train(0, 8)
    first.train(6, 10)
    written = [iterations(path)[-1] for path in sorted(tmp_path.glob("previous_*/metrics.json"))]
    assert written == [4, 6, 8]
    assert min(iterations(tmp_path / "metrics.json")) >= 6


def test_files_that_default_setup_has_moved_already_are_not_moved_twice(tmp_path):
    for _ in range(2):
        cfg = tiny_cfg(tmp_path)
        default_setup(cfg, Namespace())
        DefaultTrainer(cfg).train()
    assert [path.name for path in tmp_path.glob("previous_*")] == ["previous_1"]
    assert (tmp_path / "previous_1/log.txt").exists()


def test_a_resume_after_a_setup_that_has_moved_the_run_names_its_folder(tmp_path):
    """As in a notebook that is started again: default_setup(cfg, None) starts a new run."""
    cfg = tiny_cfg(tmp_path)
    for _ in range(2):
        default_setup(cfg, None)
        DefaultTrainer(cfg).train()
    default_setup(cfg, None)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == 0
    log = " ".join((tmp_path / "log.txt").read_text().split())
    assert f"There is a checkpoint in '{tmp_path / 'previous_2'}'" in log

    cfg.OUTPUT_DIR = str(tmp_path / "previous_2")
    default_setup(cfg, Namespace(resume=True))
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == 10
