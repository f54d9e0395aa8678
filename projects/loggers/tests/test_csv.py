import csv
import io
import math

import pytest

from trainkit.utils.events import CSVWriter, EventStorage

HEADER = "iteration,epoch,name,value\n"


def train(storage, writer, iters):
    """A write after every third iteration."""
    with storage:
        for storage.iter in iters:
            storage.put_scalar("loss", math.nan if storage.iter == 3 else math.sin(storage.iter))
            if storage.iter % 4 == 3:
                storage.put_scalar("top1", storage.iter, smoothing_hint=False)
            if storage.iter % 3 == 2:
                writer.write()


@pytest.fixture
def whole(tmp_path):
    """What an uninterrupted run of 20 iterations writes."""
    writer = CSVWriter(tmp_path / "whole" / "metrics.csv")
    train(EventStorage(), writer, range(20))
    writer.close()
    return (tmp_path / "whole" / "metrics.csv").read_text()


def test_each_new_scalar_has_a_row_with_its_iteration_and_its_exact_value(tmp_path):
    writer = CSVWriter(tmp_path / "metrics.csv", window_size=3)
    with EventStorage() as storage:
        for storage.iter, loss in enumerate([9.0, 1.0, 8.0, 0.1]):
            storage.put_scalar("loss", loss)
        storage.put_scalar("rare", 1 / 3, cur_iter=1)
        storage.put_scalar("top1", 50.0)
        writer.write()
        writer.write()  # nothing is new
        storage.iter = 4
        storage.put_scalar('a, "b"', math.nan)
        storage.put_scalar("high", math.inf)
        storage.put_scalar("low", -math.inf)
        writer.write()
        writer.close()

    text = (tmp_path / "metrics.csv").read_text()
    assert text.splitlines() == [
        "iteration,epoch,name,value",
        "1,,rare,0.3333333333333333",
        "3,,loss,1.0",
        "3,,top1,50.0",
        '4,,"a, ""b""",nan',
        "4,,high,inf",
        "4,,low,-inf",
    ]
    assert list(csv.DictReader(io.StringIO(text)))[3] == {
        "iteration": "4", "epoch": "", "name": 'a, "b"', "value": "nan"
    }  # fmt: skip


@pytest.mark.parametrize("load", [True, False])
@pytest.mark.parametrize("state_at", [0, 1, 3, 7, 12])
def test_the_file_of_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path, whole, state_at, load):
    path = tmp_path / "metrics.csv"
    first, storage = CSVWriter(path), EventStorage()
    train(storage, first, range(state_at))
    state, stored = first.state_dict(), storage.state_dict()
    train(storage, first, range(state_at, 20))
    first.close()

    second, storage = CSVWriter(path), EventStorage()
    storage.load_state_dict(stored)
    if load:
        second.load_state_dict(state)
    train(storage, second, range(state_at, 20))
    second.close()

    assert (path.read_text() == whole) == load
    assert path.read_text().count(HEADER) == 1
    tail = tmp_path / "metrics.csv.cut_1"
    assert tail.exists() == load
    if tail.exists():
        assert whole.endswith(tail.read_text())


def test_a_name_that_a_spreadsheet_would_compute_is_text_and_numbers_stay_numbers(tmp_path):
    names = ["=HYPERLINK(A1)", "+1", "-1", "@SUM", "\tx", "\n=x", " =x"]
    writer = CSVWriter(tmp_path / "metrics.csv")
    with EventStorage() as storage:
        for name in [*names, "\r=x", "a=b", "c\r=d"]:
            storage.put_scalar(name, -1.5)
        writer.write()
        writer.close()
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"] for row in rows} == {*(f"'{name}" for name in names), "a=b", "c =d"}
    assert {row["value"] for row in rows} == {"-1.5"}
