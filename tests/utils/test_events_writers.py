import json
import logging
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainkit.utils.events import CommonMetricPrinter, EventStorage, EventWriter, JSONWriter


def test_a_writer_without_write_says_so():
    class Mute(EventWriter):
        pass

    with pytest.raises(NotImplementedError, match=r"Mute must define write\(\)"):
        Mute().write()
    Mute().close()
    assert Mute().state_dict() == {}
    Mute().load_state_dict({})
    with pytest.raises(NotImplementedError, match=r"Mute saves a state \(a, b\)"):
        Mute().load_state_dict({"a": 1, "b": 2})


# ---------------------------------------------------------------------- JSON


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def read_strictly(path):
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_json_has_one_line_per_write_with_the_newest_values(tmp_path):
    writer = JSONWriter(tmp_path / "metrics.json")
    with EventStorage() as storage:
        for storage.iter in range(60):
            storage.put_scalar("key", storage.iter, smoothing_hint=False)
            if storage.iter % 20 == 19:
                writer.write()
        writer.close()

    assert read_strictly(tmp_path / "metrics.json") == [
        {"iteration": 19, "key": 19.0},
        {"iteration": 39, "key": 39.0},
        {"iteration": 59, "key": 59.0},
    ]


def test_json_lines_are_by_the_iteration_of_the_scalars(tmp_path):
    writer = JSONWriter(tmp_path / "metrics.json")
    with EventStorage() as storage:
        for storage.iter in range(60):
            if storage.iter % 17 == 0:
                storage.put_scalar("rare", storage.iter, smoothing_hint=False)
            storage.put_scalar("often", storage.iter, smoothing_hint=False)
            if storage.iter % 20 == 19:
                writer.write()
        writer.close()

    assert read_strictly(tmp_path / "metrics.json") == [
        {"iteration": 17, "rare": 17.0},
        {"iteration": 19, "often": 19.0},
        {"iteration": 34, "rare": 34.0},
        {"iteration": 39, "often": 39.0},
        {"iteration": 51, "rare": 51.0},
        {"iteration": 59, "often": 59.0},
    ]


def test_json_values_are_smoothed_over_the_window(tmp_path):
    writer = JSONWriter(tmp_path / "metrics.json", window_size=3)
    with EventStorage() as storage:
        for storage.iter, loss in enumerate([9.0, 1.0, 8.0, 2.0]):
            storage.put_scalar("loss", loss)
            storage.put_scalar("lr", loss, smoothing_hint=False)
        writer.write()
        writer.close()

    assert read_strictly(tmp_path / "metrics.json") == [{"iteration": 3, "loss": 2.0, "lr": 2.0}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_is_valid_where_a_value_is_not_finite(tmp_path, value):
    writer = JSONWriter(tmp_path / "metrics.json")
    with EventStorage() as storage:
        storage.put_scalars(bad=value, good=1.0)
        writer.write()
        writer.close()

    assert read_strictly(tmp_path / "metrics.json") == [{"bad": None, "good": 1.0, "iteration": 0}]


def test_json_has_every_number_to_the_last_bit_under_any_name_in_the_order_of_names(tmp_path):
    row = {'say "hi"\\\n': 0.1 + 0.2, "größe": 5e-324, "iteration/1": -0.0, "a": 1e22, "A": 123456789.0}
    writer = JSONWriter(tmp_path / "metrics.json")
    with EventStorage() as storage:
        storage.put_scalars(**row)
        writer.write()
        writer.close()

    text = (tmp_path / "metrics.json").read_text()
    assert text == json.dumps({"iteration": 0, **row}, sort_keys=True) + "\n"


@pytest.mark.parametrize("epoch", [np.int64(3), torch.tensor(3), 3])
def test_json_has_an_epoch_of_any_whole_type_as_a_number(tmp_path, epoch):
    writer = JSONWriter(tmp_path / "metrics.json")
    with EventStorage() as storage:
        storage.put_scalar("a", 1.0, epoch=epoch)
        writer.write()
        writer.close()

    assert read_strictly(tmp_path / "metrics.json") == [{"a": 1.0, "epoch": 3, "iteration": 0}]


def test_json_has_nothing_twice_and_is_complete_after_each_write(tmp_path):
    path = tmp_path / "metrics.json"
    writer = JSONWriter(path)
    with EventStorage() as storage:
        storage.put_scalar("a", 1.0)
        writer.write()
        writer.write()
        assert read_strictly(path) == [{"a": 1.0, "iteration": 0}]  # a reader need not wait for the end

        storage.iter = 1
        storage.put_scalar("b", 2.0)
        writer.write()
        writer.close()

    assert read_strictly(path) == [{"a": 1.0, "iteration": 0}, {"b": 2.0, "iteration": 1}]


def test_json_does_not_lose_a_value_that_arrives_behind_a_write_of_a_later_iteration(tmp_path):
    writer = JSONWriter(tmp_path / "metrics.json")
    with EventStorage(start_iter=19) as storage:
        storage.put_scalar("lr", 0.1)
        writer.write()
        storage.put_scalar("loss", 5.0, cur_iter=17)
        writer.write()
        writer.close()

    assert read_strictly(tmp_path / "metrics.json") == [
        {"iteration": 19, "lr": 0.1},
        {"iteration": 17, "loss": 5.0},
    ]


def test_json_goes_on_in_the_same_file_in_a_second_run_from_the_first_iteration(tmp_path):
    writer = JSONWriter(str(tmp_path / "metrics.json"))
    for value in (1.0, 2.0):
        with EventStorage() as storage:
            storage.put_scalar("a", value)
            writer.write()
            writer.close()
    writer.close()  # harmless

    assert read_strictly(tmp_path / "metrics.json") == [{"a": 1.0, "iteration": 0}, {"a": 2.0, "iteration": 0}]


def test_json_has_scalars_with_an_epoch_in_lines_of_their_own(tmp_path):
    writer = JSONWriter(tmp_path / "metrics.json")
    with EventStorage() as storage:
        for storage.iter in range(4):
            storage.put_scalar("loss", 0.5)
            storage.put_scalar("epoch", storage.iter // 2, smoothing_hint=False)
            if storage.iter % 2:
                storage.put_scalar("top1", 50.0, smoothing_hint=False, epoch=storage.iter // 2 + 1)
                storage.put_scalar("top5", 90.0, smoothing_hint=False, epoch=storage.iter // 2 + 1)
                writer.write()
        writer.close()

    assert read_strictly(tmp_path / "metrics.json") == [
        {"iteration": 1, "loss": 0.5, "epoch": 0.0},
        {"iteration": 1, "epoch": 1, "top1": 50.0, "top5": 90.0},
        {"iteration": 3, "loss": 0.5, "epoch": 1.0},
        {"iteration": 3, "epoch": 2, "top1": 50.0, "top5": 90.0},
    ]


def test_json_touches_no_file_before_the_first_write(tmp_path):
    (tmp_path / "metrics.json").write_text('{"iteration": 0}\n')
    JSONWriter(tmp_path / "metrics.json").close()
    JSONWriter(tmp_path / "other.json").close()

    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    assert read_strictly(tmp_path / "metrics.json") == [{"iteration": 0}]


@pytest.mark.parametrize(
    "make",
    [
        lambda path: JSONWriter(path / "metrics.json", window_size=0),
        lambda path: CommonMetricPrinter(window_size=0),
    ],
    ids=["JSONWriter", "CommonMetricPrinter"],
)
def test_a_window_without_an_iteration_is_refused_by_the_constructor(tmp_path, make):
    with pytest.raises(ValueError, match="window_size must be >= 1 iteration, got 0"):
        make(tmp_path)


# ---------------------------------------------------------------------- console


@pytest.fixture
def clock(monkeypatch):
    """Its ``now`` is the time."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("trainkit.utils.events.writers.time.perf_counter", lambda: clock.now)
    return clock


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    caplog.set_level(logging.INFO, logger="trainkit.utils.events.writers")
    return lambda: [record.getMessage() for record in caplog.records]


def test_console_line_has_eta_iteration_scalars_times_and_learning_rate(lines):
    printer = CommonMetricPrinter(max_iter=4000, window_size=3)
    with EventStorage() as storage:
        for storage.iter, loss in enumerate([9.0, 0.123456, 8.0, 2.5]):
            storage.put_scalars(time=0.5, data_time=0.25 * storage.iter, rank_data_time=7.0)
            storage.put_scalar("lr", 0.00123456, smoothing_hint=False)
            storage.put_scalar("total_loss", loss)
            storage.put_scalar("[metric]scale", 65536.0)
            storage.put_scalar("digits/top1", 99.0, smoothing_hint=False)  # a result, not a running value
        printer.write()

    assert lines() == [
        " eta: 0:33:18  after 4 of 4000 iterations  total_loss: 2.5  [metric]scale: 6.554e+04  "
        "time: 0.5000  data_time: 0.5000  lr: 0.0012346 "
    ]


def test_console_line_shows_scalars_whose_name_has_no_loss_in_it(lines):
    printer = CommonMetricPrinter()
    with EventStorage() as storage:
        storage.put_scalars(accuracy=0.5, perplexity=20.25, loss_mask=1.0)
        printer.write()

    assert lines() == ["after 1 iteration  accuracy: 0.5  perplexity: 20.25  loss_mask: 1 "]


def test_console_line_is_the_same_for_scalars_with_an_epoch(lines):
    for epoch in (None, 3):
        with EventStorage(start_iter=5) as storage:
            storage.put_scalar("loss", 1.0, epoch=epoch)
            storage.put_scalar("top1", 50.0, smoothing_hint=False, epoch=epoch)
            CommonMetricPrinter().write()

    assert len(lines()) == 2
    assert lines()[0] == lines()[1]


def test_console_line_has_the_peak_memory_of_cuda(lines, monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.memory.max_memory_allocated", lambda: 3 * 2**20)
    with EventStorage() as storage:
        storage.put_scalar("time", 1.0)
        CommonMetricPrinter().write()

    assert lines() == ["after 1 iteration  time: 1.0000  max_mem: 3M"]


def test_console_is_silent_when_nothing_is_left_to_train(lines):
    printer = CommonMetricPrinter(max_iter=10)
    with EventStorage(start_iter=9) as storage:
        storage.put_scalar("time", 1.0)
        printer.write()
        storage.iter = 10
        printer.write()

    assert lines() == [" eta: 0:00:00  after 10 of 10 iterations  time: 1.0000 "]


def test_console_eta_comes_from_the_median_time_and_ignores_a_slow_iteration(lines):
    printer = CommonMetricPrinter(max_iter=100)
    with EventStorage() as storage:
        for storage.iter in range(10):
            storage.put_scalar("time", 600.0 if storage.iter == 9 else 2.0)
        printer.write()

    assert lines()[0].startswith(" eta: 0:03:00  after 10 of 100 iterations ")  # 90 iterations of 2 s


def write_at(printer, storage, *iters):
    for storage.iter in iters:
        storage.put_scalar("a", 1.0)
        printer.write()


def test_console_logs_at_most_one_line_per_interval_and_the_last_one(lines, clock):
    printer = CommonMetricPrinter(max_iter=100, min_interval_sec=1.0)
    with EventStorage() as storage:
        for iter, now in ((19, 0.0), (39, 0.9), (59, 1.0), (79, 1.5), (99, 1.6)):
            clock.now = 1000 + now
            write_at(printer, storage, iter)

    assert [int(re.search(r"after (\d+) of", line)[1]) for line in lines()] == [20, 60, 100]


def test_console_names_the_last_iteration_that_was_done_when_a_run_was_stopped(lines):
    with EventStorage() as storage:
        storage.put_scalar("loss", 1.0)
        storage.iter = 1  # the next iteration
        CommonMetricPrinter().write()
    with EventStorage() as storage:  # an evaluation before training
        storage.put_scalar("top1", 1.0, smoothing_hint=False)
        CommonMetricPrinter().write()

    assert lines() == ["after 1 iteration  loss: 1 "]


@pytest.mark.parametrize(
    ("max_iter", "shown"),
    [(7, ["[Epoch 1/3] ", "[Epoch 1/3] ", "[Epoch 2/3] ", "[Epoch 3/3] "]), (None, ["[Epoch 1] "] * 2)],
)
def test_the_line_names_the_epoch_if_there_are_some(lines, max_iter, shown):
    with EventStorage() as storage:
        write_at(CommonMetricPrinter(max_iter, iters_per_epoch=3), storage, *(0, 2, 3, 6)[: len(shown)])
    assert [re.search(r"\[Epoch .+?\] ", line)[0] for line in lines()] == shown
