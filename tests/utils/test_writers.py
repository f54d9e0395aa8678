"""The console, and the metrics file: also of a run that was killed and goes on, and of one whose disk is full."""

import json
import logging
import math
import re
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch

from tests.engine.tiny import through_a_file
from trainkit.utils.events import CommonMetricPrinter, EventStorage, JSONWriter


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.json"


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def read_strictly(path):
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_json_has_the_newest_values_smoothed_by_the_iterations_of_the_scalars(path):
    writer = JSONWriter(path, window_size=3)
    with EventStorage() as storage:
        for storage.iter in range(40):
            if storage.iter % 17 == 0:
                storage.put_scalar("rare", storage.iter, smoothing_hint=False)
            storage.put_scalar("often", storage.iter)
            if storage.iter % 20 == 19:
                writer.write()
                writer.write()
                # complete, and nothing twice
                assert len(read_strictly(path)) == 2 * (storage.iter // 20 + 1)
        storage.put_scalar("late", 5.0, cur_iter=17)
        writer.write()
        writer.close()
        writer.close()  # harmless

    assert read_strictly(path) == [
        {"iteration": 17, "rare": 17.0},
        {"iteration": 19, "often": 18.0},
        {"iteration": 34, "rare": 34.0},
        {"iteration": 39, "often": 38.0},
        {"iteration": 17, "late": 5.0},
    ]


def test_json_has_every_number_to_the_last_bit_under_any_name_in_the_order_of_names(path):
    row = {
        'say "hi"\\\n': 0.1 + 0.2,
        "größe": 5e-324,
        "iteration/1": -0.0,
        "a": 1e22,
        "A": 123456789.0,
    }
    writer = JSONWriter(path)
    for values in (row, {"bad": math.nan, "worse": -math.inf}):
        with EventStorage() as storage:
            storage.put_scalars(**values)
            writer.write()
            writer.close()
    first, second = path.read_text().splitlines()
    assert first == json.dumps({"iteration": 0, **row}, sort_keys=True)
    # a second run goes on in the same file
    assert second == '{"bad": null, "iteration": 0, "worse": null}'


def test_a_smoothed_value_is_that_of_what_is_finite_beside_the_count_of_the_others(path, lines):
    writers = JSONWriter(path, window_size=4), CommonMetricPrinter(window_size=4)
    with EventStorage() as storage:
        for storage.iter, norm in enumerate([math.nan, 8.0, math.inf, 2.0, 4.0, 3.0, 5.0]):
            storage.put_scalars(grad_norm=norm, loss=1.0)
            storage.put_scalar("top1", math.nan, smoothing_hint=False)
            if storage.iter in (3, 6):
                for writer in writers:
                    writer.write()
        writers[0].close()
    assert read_strictly(path) == [
        {"iteration": 3, "grad_norm": 5.0, "grad_norm_not_finite": 2, "loss": 1.0, "top1": None},
        {"iteration": 6, "grad_norm": 3.5, "loss": 1.0, "top1": None},
    ]
    assert lines() == [
        "after 4 iterations  grad_norm: 5 (2 not finite)  loss: 1",
        "after 7 iterations  grad_norm: 3.5  loss: 1",
    ]


def train(storage, writer, iters):
    """A write after every third iteration."""
    with storage:
        for storage.iter in iters:
            storage.put_scalar("loss", math.nan if storage.iter == 3 else math.sin(storage.iter))
            storage.put_scalar("lr", storage.iter / 10, smoothing_hint=False)
            if storage.iter % 4 == 3:
                storage.put_scalar("top1", storage.iter, smoothing_hint=False)
            if storage.iter % 3 == 2:
                writer.write()


def kill_and_resume(path, state_at, killed_at, *, load=True, meanwhile=lambda: None):
    """A run of 20 iterations whose state is taken, and which goes on for a while before it is killed."""
    first, first_storage = JSONWriter(path), EventStorage()
    train(first_storage, first, range(state_at))
    state = through_a_file({"writer": first.state_dict(), "storage": first_storage.state_dict()})
    train(first_storage, first, range(state_at, killed_at))
    first.close()  # writes nothing
    meanwhile()
    second, second_storage = JSONWriter(path), EventStorage()
    second_storage.load_state_dict(state["storage"])
    if load:
        second.load_state_dict(state["writer"])
    train(second_storage, second, range(state_at, 20))
    second.close()


@pytest.fixture
def expected(tmp_path):
    """What an uninterrupted run of 20 iterations writes."""
    writer = JSONWriter(tmp_path / "whole" / "metrics.json")
    train(EventStorage(), writer, range(20))
    writer.close()
    return (tmp_path / "whole" / "metrics.json").read_bytes()


@pytest.mark.parametrize(("state_at", "extra"), [(0, 5), (7, 1), (7, 5)])
def test_the_file_of_a_resumed_run_is_byte_for_byte_that_of_an_uninterrupted_one(
    path, expected, state_at, extra
):
    kill_and_resume(path, state_at, state_at + extra)
    assert path.read_bytes() == expected
    cut = 0 if state_at // 3 == (state_at + extra) // 3 else 1
    assert len([*path.parent.iterdir()]) == 1 + cut
    kill_and_resume(path, state_at, state_at + extra, load=False)
    assert path.read_bytes() != expected  # without the state, lines are there twice


def test_lines_that_are_cut_off_are_kept_in_a_new_file_each_time(path):
    writer = JSONWriter(path)
    train(EventStorage(), writer, range(10))
    writer.close()
    before = path.read_text().splitlines(keepends=True)
    for n in (1, 2):
        writer = JSONWriter(path)
        # as earlier versions wrote it
        state = {
            "length": len(before[0]),
            "taken": {},
            "pending": [],
        }
        writer.load_state_dict(state)
        # a checkpoint before the first write
        assert writer.state_dict() == {
            "length": len(before[0]),
            "taken": {},
        }
        assert len([*path.parent.iterdir()]) == n  # nothing is touched before the first write
        with EventStorage(start_iter=n) as storage:
            storage.put_scalar("lr", 1.0)
            writer.write()
            writer.close()

    assert path.with_suffix(".json.cut_1").read_text() == "".join(before[1:])
    assert path.with_suffix(".json.cut_2").read_text() == '{"iteration": 1, "lr": 1.0}\n'
    assert path.read_text() == before[0] + '{"iteration": 2, "lr": 1.0}\n'


def test_a_line_that_the_kill_has_left_incomplete_is_cut_off_and_a_lost_file_starts_again(
    path, expected
):
    kill_and_resume(path, 7, 12, meanwhile=lambda: path.write_bytes(path.read_bytes()[:-5]))
    assert path.read_bytes() == expected
    shutil.rmtree(path.parent)
    kill_and_resume(path, 7, 7, meanwhile=path.unlink)
    assert path.read_bytes().splitlines()[0] == b'{"iteration": 7, "top1": 7.0}'


@pytest.mark.parametrize("end", [-1, -20])
def test_a_file_that_is_shorter_than_its_checkpoint_says_keeps_whole_lines_and_the_loss_is_logged(
    path, caplog, end
):
    kill_and_resume(path, 13, 13, meanwhile=lambda: path.write_bytes(path.read_bytes()[:end]))
    iterations = [line["iteration"] for line in read_strictly(path)]
    assert iterations == [2, 3, 5, 7, 8, 14, 15, 17]  # that of 11 was lost
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(
        r"metrics\.json has lost lines .* \d+ bytes, and had \d+", warning.getMessage()
    )
    assert path.with_suffix(".json.cut_1").read_text().startswith('{"iteration": 11')


def test_a_file_of_another_run_is_not_cut_in_the_middle_of_a_line(path):
    def replace():
        path.write_text('{"iteration": 0, "a": 1.0}\n' + '{"iteration": 1, "b": 2.0}\n' * 40)

    kill_and_resume(path, 13, 13, meanwhile=replace)
    assert [line["iteration"] for line in read_strictly(path)][-4:] == [1, 14, 15, 17]


def test_a_line_that_a_kill_has_left_incomplete_is_moved_away_also_without_a_checkpoint(path):
    path.parent.mkdir()
    path.write_text('{"iteration": 0, "a": 1.0}\n{"itera')
    with EventStorage(start_iter=1) as storage:
        storage.put_scalar("a", 2.0)
        writer = JSONWriter(path)
        writer.write()
        writer.close()
    assert read_strictly(path) == [{"iteration": 0, "a": 1.0}, {"iteration": 1, "a": 2.0}]
    assert path.with_suffix(".json.cut_1").read_text() == '{"itera'


def test_a_file_that_is_deleted_during_the_run_is_an_error_of_the_next_write(path):
    writer, storage = JSONWriter(path), EventStorage()
    train(storage, writer, range(10))
    shutil.rmtree(path.parent)
    with pytest.raises(FileNotFoundError, match=r"metrics\.json was deleted"):
        train(storage, writer, range(10, 20))
    writer.close()
    assert not path.parent.exists()


@pytest.fixture
def file_size():
    """Sets how many bytes a file of this process may have; ``None``: as many as before."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, before if bytes is None else (bytes, before[1]))

    yield limit
    limit(None)


def test_a_write_without_room_leaves_no_part_of_a_line(path, expected, file_size):
    writer, storage = JSONWriter(path), EventStorage()
    train(storage, writer, range(6))
    good = path.read_bytes()
    file_size(len(good) + 5)
    with pytest.raises(OSError, match="File too large"):
        train(storage, writer, range(6, 9))
    assert path.read_bytes() == good
    file_size(None)
    train(storage, writer, range(9, 20))
    writer.close()
    lines = expected.splitlines(keepends=True)
    assert path.read_bytes() == b"".join(
        line for line in lines if not re.search(rb'"iteration": [78]\b', line)
    )


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    caplog.set_level(logging.INFO, logger="trainkit.utils.events.writers")
    return lambda: [record.getMessage() for record in caplog.records]


def test_console_line_has_eta_iteration_scalars_times_and_learning_rate(lines):
    printer = CommonMetricPrinter(max_iter=4000, window_size=3)
    with EventStorage() as storage:
        for storage.iter, loss in enumerate([9.0, 0.123456, 8.0, 2.5]):
            storage.put_scalars(
                time=600.0 if storage.iter == 3 else 0.5, data_time=0.25 * storage.iter
            )
            storage.put_scalars(rank_data_time=7.0, perplexity=20.25)
            storage.put_scalar("lr", 0.00123456, smoothing_hint=False)
            storage.put_scalar("total_loss", loss)
            storage.put_scalar("[metric]scale", 65536.0)
            # a result, not a running value
            storage.put_scalar("digits/top1", 99.0, smoothing_hint=False)
        printer.write()
    assert lines() == [
        "eta 0:33:18  after 4/4000  perplexity: 20.25  total_loss: 2.5  [metric]scale: 6.554e+04  "
        "time: 0.5000 (data 0.5000)  lr: 0.00123"
    ]


def test_console_line_has_the_epoch_if_there_are_some_and_the_peak_memory_of_cuda(
    lines, monkeypatch
):
    printers = [CommonMetricPrinter(7, iters_per_epoch=3), CommonMetricPrinter(iters_per_epoch=3)]
    with EventStorage() as storage:
        for storage.iter in (0, 2, 3, 6):
            storage.put_scalar("a", 1.0)
            printers[0].write()
        printers[1].write()
    epochs = ["epoch 1/3", "epoch 1/3", "epoch 2/3", "epoch 3/3", "epoch 3"]
    assert [line.split("  ")[0] for line in lines()] == epochs
    monkeypatch.setattr(
        "torch.accelerator.current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr("torch.accelerator.memory.max_memory_allocated", lambda: 3 * 2**20)
    with EventStorage() as storage:
        storage.put_scalar("time", 1.0)
        CommonMetricPrinter().write()
    assert lines()[-1] == "after 1 iteration  time: 1.0000  max_mem: 3M"


def test_console_is_silent_when_nothing_is_left_to_train_and_before_there_is_a_running_value(lines):
    printer = CommonMetricPrinter(max_iter=10)
    with EventStorage(start_iter=9) as storage:
        storage.put_scalar("top1", 1.0, smoothing_hint=False)
        printer.write()
        storage.put_scalar("time", 1.0)
        printer.write()
        storage.iter = 10
        printer.write()
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        storage.iter = 1  # the next iteration of a run that was stopped
        CommonMetricPrinter().write()
    assert lines() == [
        "eta 0:00:00  after 10/10  time: 1.0000",
        "after 1 iteration  loss: 1",
    ]


def test_console_logs_at_most_one_line_per_interval_and_the_last_one(lines, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("trainkit.utils.events.writers.time.perf_counter", lambda: clock.now)
    printer = CommonMetricPrinter(max_iter=100, min_interval_sec=1.0)
    with EventStorage() as storage:
        for storage.iter, now in ((19, 0.0), (39, 0.9), (59, 1.0), (79, 1.5), (99, 1.6)):
            clock.now = 1000 + now
            storage.put_scalar("a", 1.0)
            printer.write()
    assert [int(re.search(r"after (\d+)/", line)[1]) for line in lines()] == [20, 60, 100]
