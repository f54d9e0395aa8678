import io
import json
import math
import threading

import pytest
import torch

from tests.engine.tiny import defer
from trainkit.checkpoint.state import plain_state
from trainkit.utils.events import (
    CommonMetricPrinter,
    CSVWriter,
    EventStorage,
    JSONWriter,
    TensorboardXWriter,
    get_event_storage,
    has_event_storage,
)

# ---------------------------------------------------------------------- finding the storage


def put_row(storage, row, **kwargs):
    for name, value in row.items():
        storage.put_scalar(name, value, **kwargs)


def test_without_an_open_storage_the_error_says_how_to_open_one():
    assert not has_event_storage()
    with pytest.raises(RuntimeError, match=r"no EventStorage is open: .*`with EventStorage\(\):`.*has_event_storage"):
        get_event_storage()


def test_the_innermost_open_storage_is_found():
    with EventStorage() as outer:
        assert get_event_storage() is outer
        with EventStorage() as inner:
            assert get_event_storage() is inner
            get_event_storage().put_scalar("loss", 1.0)
        assert get_event_storage() is outer
        assert has_event_storage()
    assert not has_event_storage()
    assert (list(outer.latest()), list(inner.latest())) == ([], ["loss"])


def test_a_storage_is_closed_by_an_exception():
    with pytest.raises(KeyError), EventStorage():
        raise KeyError

    assert not has_event_storage()


# ---------------------------------------------------------------------- scalars


def test_scalars_are_kept_with_the_iteration_in_which_they_were_put():
    storage = EventStorage(start_iter=3)
    storage.put_scalar("loss", torch.tensor(2.0))
    storage.iter = 7
    storage.put_scalars(loss=4, lr=0.5)
    storage.step()
    storage.put_scalar("late", 1.0, cur_iter=5)

    assert storage.history("loss").values() == [(2.0, 3), (4.0, 7)]
    assert storage.latest() == {"loss": (4.0, 7), "lr": (0.5, 7), "late": (1.0, 5)}
    assert (storage.iter, storage.iteration) == (8, 8)
    assert set(storage.histories()) == {"loss", "lr", "late"}


def test_values_are_plain_floats():
    storage = EventStorage()
    storage.put_scalar("loss", torch.tensor(2))

    assert type(storage.latest()["loss"][0]) is float


def test_smoothing_is_the_median_over_the_last_iterations_and_not_over_the_last_values():
    storage = EventStorage()
    for storage.iter in range(60):
        storage.put_scalar("each", storage.iter)
        if storage.iter % 10 == 9:
            storage.put_scalar("tenth", storage.iter)  # 9, 19, ..., 59
        storage.put_scalar("lr", storage.iter, smoothing_hint=False)

    assert storage.latest_with_smoothing_hint(20) == {"each": (49.5, 59), "tenth": (54.0, 59), "lr": (59.0, 59)}
    assert (storage.count_samples("each", 20), storage.count_samples("tenth", 20)) == (20, 2)
    assert storage.count_samples("tenth", 21) == 3
    assert storage.smoothing_hints() == {"each": True, "tenth": True, "lr": False}


def test_the_window_of_a_name_ends_at_its_own_newest_value():
    storage = EventStorage()
    for storage.iter in range(4):
        storage.put_scalar("old", storage.iter)
    storage.iter = 1000
    storage.put_scalar("new", 5.0)

    assert storage.latest_with_smoothing_hint(3) == {"old": (2.0, 3), "new": (5.0, 1000)}


def test_nan_shows_in_the_smoothed_value_until_it_leaves_the_window():
    storage = EventStorage()
    for storage.iter, value in enumerate([1.0, math.nan, 3.0, 5.0]):
        storage.put_scalar("loss", value)

    assert math.isnan(storage.latest_with_smoothing_hint(3)["loss"][0])
    assert storage.latest_with_smoothing_hint(2) == {"loss": (4.0, 3)}


def test_histories_are_bounded_and_their_global_average_is_not():
    storage = EventStorage(history_length=100)
    for storage.iter in range(1000):
        storage.put_scalar("loss", storage.iter)

    assert storage.history("loss").values() == [(float(i), i) for i in range(900, 1000)]
    assert storage.history("loss").global_avg() == 499.5


@pytest.mark.parametrize("first", [True, False])
def test_a_name_that_changes_its_smoothing_hint_is_refused_and_not_stored(first):
    storage = EventStorage()
    storage.put_scalar("acc", 1.0, smoothing_hint=first)

    message = rf"'acc' was put with smoothing_hint={first} before and now with smoothing_hint={not first}"
    with pytest.raises(ValueError, match=message):
        storage.put_scalar("acc", 2.0, smoothing_hint=not first)
    assert storage.history("acc").values() == [(1.0, 0)]


def test_an_unknown_name_is_an_error_that_names_the_known_ones():
    storage = EventStorage()
    storage.put_scalars(b=1, a=2)

    with pytest.raises(KeyError, match=r"no scalar is called 'c'; there are \['a', 'b'\]"):
        storage.history("c")


def test_an_iteration_that_is_no_whole_number_is_refused_and_nothing_is_stored():
    storage = EventStorage()
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        storage.put_scalar("loss", 1.0, cur_iter=1.5)

    assert (storage.latest(), storage.histories()) == ({}, {})


# ---------------------------------------------------------------------- images, histograms, names


def test_images_keep_name_tensor_and_iteration():
    storage = EventStorage(start_iter=4)
    picture = torch.rand(3, 2, 2)
    storage.put_image("sample", picture)

    [image] = storage.images()

    assert (image.name, image.iter) == ("sample", 4)
    assert image.tensor is picture


def test_images_and_histograms_that_no_writer_takes_are_bounded():
    storage = EventStorage()
    for storage.iter in range(150):
        storage.put_image("image", torch.zeros(1, 1, 1))
        storage.put_histogram("histogram", torch.zeros(1), bins=1)

    assert [image.iter for image in storage.images()] == list(range(50, 150))
    assert [histogram.iter for histogram in storage.histograms()] == list(range(50, 150))

    storage.clear_images()
    storage.clear_histograms()
    assert (storage.images(), storage.histograms()) == ([], [])


def test_a_histogram_of_a_tensor_of_any_shape_counts_every_element():
    storage = EventStorage(start_iter=9)
    storage.put_histogram("weight", torch.arange(6.0, requires_grad=True).reshape(3, 2), bins=5)

    [histogram] = storage.histograms()

    assert (histogram.name, histogram.iter) == ("weight", 9)
    assert histogram.raw == {
        "min": 0.0,
        "max": 5.0,
        "num": 6,
        "sum": 15.0,
        "sum_squares": 55.0,
        "bucket_limits": [1.0, 2.0, 3.0, 4.0, 5.0],
        "bucket_counts": [1.0, 1.0, 1.0, 1.0, 2.0],
    }


def test_name_scope_applies_to_scalars_images_and_histograms():
    storage = EventStorage()
    with storage.name_scope("head/"):
        storage.put_scalar("loss", 1.0)
        storage.put_image("image", torch.zeros(1, 1, 1))
        storage.put_histogram("histogram", torch.zeros(1))
    storage.put_scalar("loss", 2.0)

    assert storage.latest() == {"head/loss": (1.0, 0), "loss": (2.0, 0)}
    assert [image.name for image in storage.images()] == ["head/image"]
    assert [histogram.name for histogram in storage.histograms()] == ["head/histogram"]


def test_name_scope_is_left_by_an_exception_too():
    storage = EventStorage()
    with storage.name_scope("outer"):
        with pytest.raises(KeyError), storage.name_scope("inner"):
            raise KeyError
        storage.put_scalar("a", 1.0)
    storage.put_scalar("b", 1.0)

    assert list(storage.latest()) == ["outer/a", "b"]


# ---------------------------------------------------------------------- a worker


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("trainkit-metrics")]


def fail(message="no space left"):
    raise OSError(message)


def put_and_publish(with_worker):
    """What a reader that is published every third iteration sees, and what is stored in the end."""
    seen = []
    with EventStorage(history_length=12) as storage:
        if with_worker:
            defer(storage)

        def read():
            here = get_event_storage()
            seen.append((here.iter, here.latest_with_smoothing_hint(4), [image.iter for image in here.images()]))
            here.clear_images()
            here.put_scalar("eta", float(here.iter), smoothing_hint=False)

        put(storage, [])
        for iter in range(10):
            put(storage, [iter])
            if iter % 3 == 2:
                storage.publish(read)
        return seen, read_all(storage)


def test_a_worker_stores_and_shows_the_same_as_the_loop_would():
    assert put_and_publish(True) == put_and_publish(False)


def test_a_reader_sees_what_was_put_before_it_and_the_loop_does_not_wait_for_it():
    go, seen = threading.Event(), []
    with EventStorage() as storage:
        defer(storage)
        storage.put_scalar("loss", 1.0)
        storage.publish(lambda: go.wait(20))
        storage.publish(lambda: seen.append((get_event_storage().iter, get_event_storage().latest())))
        storage.iter = 1
        with storage.name_scope("later"):
            storage.put_scalar("loss", 2.0)
        assert seen == []
        go.set()
        assert storage.latest() == {"loss": (1.0, 0), "later/loss": (2.0, 1)}
    assert seen == [(0, {"loss": (1.0, 0)})]
    assert workers() == []


def test_a_storage_opened_meanwhile_gets_nothing_of_what_the_worker_puts():
    go = threading.Event()
    with EventStorage() as storage:
        defer(storage)
        storage.publish(lambda: go.wait(20) and get_event_storage().put_scalar("late", 1.0))
        with EventStorage() as meanwhile:
            go.set()
            storage.flush()
        assert (storage.latest(), meanwhile.latest()) == ({"late": (1.0, 0)}, {})


def test_the_first_error_of_a_worker_is_raised_once_and_what_follows_is_stored():
    with EventStorage() as storage:
        defer(storage)
        storage.publish(lambda: fail("first"))
        storage.publish(lambda: fail("second"))
        storage.put_scalar("loss", 1.0)
        with pytest.raises(OSError, match="first"):
            storage.flush()
        storage.worker.raise_error()
        assert storage.latest() == {"loss": (1.0, 0)}


def test_an_error_that_nobody_asked_for_is_raised_when_the_storage_is_closed_but_hides_no_other(caplog):
    def run(error=None):
        with EventStorage() as storage:
            defer(storage)
            storage.publish(fail)
            if error is not None:
                raise error

    with pytest.raises(OSError, match="no space left"):
        run()
    with pytest.raises(KeyError):
        run(KeyError())
    assert "no space left" in caplog.text
    assert workers() == []


def test_memory_is_bounded_where_nobody_reads():
    storage = EventStorage(history_length=10)
    for storage.iter in range(5000):
        storage.put_scalar("loss", 1.0)
    assert len(storage.rows) < 1000
    assert len(storage.history("loss").values()) == 10
    assert storage.history("loss").global_avg() == 1.0


def test_images_that_no_reader_has_cleared_come_back_in_their_order():
    with EventStorage() as storage:
        defer(storage)
        for storage.iter in range(3):
            storage.put_image("image", torch.zeros(1, 1, 1))
            storage.publish(lambda: None)
        assert [image.iter for image in storage.images()] == [0, 1, 2]


# ---------------------------------------------------------------------- state


def through_a_file(state):
    file = io.BytesIO()
    torch.save(plain_state(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def put(storage, iters):
    for storage.iter in iters:
        storage.put_scalars(loss=math.sin(storage.iter), tiny=0.1 / (storage.iter + 1))
        storage.put_scalar("lr", 0.1 * storage.iter, smoothing_hint=False)
        storage.put_scalar("bad", [math.nan, math.inf, -math.inf, 1.0][storage.iter % 4])
        if storage.iter % 5 == 4:
            storage.put_scalar("top1", storage.iter, smoothing_hint=False, epoch=storage.iter // 5)
            storage.put_image("image", torch.full((1, 2, 2), storage.iter / 10))
            storage.put_histogram("histogram", torch.arange(3.0) * storage.iter, bins=3)


def read_all(storage):
    """Everything that hooks and writers read; NaN equals NaN in a repr."""
    names = list(storage.histories())
    return repr(
        [
            storage.latest(),
            storage.latest_with_smoothing_hint(7),
            storage.smoothing_hints(),
            storage.epochs(),
            [(name, storage.count_samples(name, 7), storage.history(name).values()) for name in names],
            [(name, storage.history(name).median(6), storage.history(name).avg(6)) for name in names],
            [storage.history(name).global_avg().hex() for name in names],
            [(image.name, image.tensor.tolist(), image.iter) for image in storage.images()],
            storage.histograms(),
        ]
    )


@pytest.mark.parametrize("with_worker", [False, True])
def test_a_storage_goes_on_bit_for_bit_after_a_round_trip(with_worker):
    with EventStorage(history_length=12) as first, EventStorage(history_length=12) as second:
        if with_worker:
            defer(first)
            defer(second)
        put(first, range(33))
        second.put_scalars(other=1.0, loss=2.0)
        second.put_image("other", torch.zeros(1, 1, 1))

        second.load_state_dict(through_a_file(first.state_dict()))

        assert read_all(second) == read_all(first)
        put(first, range(33, 41))
        assert read_all(second) != read_all(first)
        put(second, range(33, 41))
        assert read_all(second) == read_all(first)


def test_the_iteration_is_the_loops_and_no_part_of_the_state():
    storage = EventStorage(start_iter=9)
    storage.load_state_dict(EventStorage(start_iter=3).state_dict())

    assert storage.iter == 9


def test_a_loaded_storage_keeps_its_own_length_and_the_smoothing_hints_that_were_used():
    first = EventStorage()
    put(first, range(10))
    second = EventStorage(history_length=2)
    second.load_state_dict(first.state_dict())

    assert second.history("lr").values() == first.history("lr").values()[-2:]
    with pytest.raises(ValueError, match="'lr' was put with smoothing_hint=False before"):
        second.put_scalar("lr", 1.0)


def test_a_state_does_not_change_when_the_storage_goes_on():
    storage = EventStorage()
    put(storage, range(5))
    state, before = storage.state_dict(), EventStorage()
    before.load_state_dict(through_a_file(state))
    put(storage, range(5, 10))
    storage.clear_images()
    after = EventStorage()
    after.load_state_dict(state)

    assert read_all(after) == read_all(before)


def test_the_state_has_images_that_are_arrays_or_subclasses_of_tensors_as_tensors():
    class Picture(torch.Tensor):
        pass

    storage = EventStorage()
    storage.put_image("array", torch.ones(1, 2, 2).numpy())
    storage.put_image("subclass", torch.ones(1, 2, 2).as_subclass(Picture))
    images = through_a_file(storage.state_dict())["images"]

    assert [torch.equal(image["tensor"], torch.ones(1, 2, 2)) for image in images] == [True, True]


def test_images_stay_inside_hold_images_whoever_clears_them():
    for deferring in (False, True):
        with EventStorage() as storage:
            if deferring:
                defer(storage)
            put(storage, [4])

            def write(storage=storage):
                with storage.hold_images():
                    storage.clear_images()
                    storage.clear_histograms()

            storage.publish(write)
            assert (len(storage.images()), len(storage.histograms())) == (1, 1)
            storage.clear_images()
            storage.clear_histograms()
            assert (storage.images(), storage.histograms()) == ([], [])


# ---------------------------------------------------------------------- storing at once


def test_a_row_is_stored_like_its_scalars_whatever_their_names_are():
    row = {"self": 1.0, "cur_iter": 2.0, "name": torch.tensor(3.0)}
    with EventStorage() as storage, storage.name_scope("scope"):
        put_row(storage, row, smoothing_hint=False, cur_iter=5, epoch=2)
    assert storage.latest() == {"scope/self": (1.0, 5), "scope/cur_iter": (2.0, 5), "scope/name": (3.0, 5)}
    assert set(storage.smoothing_hints().values()) == {False}
    assert storage.epochs() == dict.fromkeys(storage.latest(), 2)


@pytest.mark.parametrize("deferring", [False, True])
def test_rows_that_share_names_keep_the_order_in_which_they_were_put(deferring):
    with EventStorage() as storage:
        if deferring:
            defer(storage)
        for storage.iter in range(6):
            put_row(storage, {"a": storage.iter, "b": -storage.iter})
            storage.put_scalar("b", 10.0 + storage.iter)
            put_row(storage, {"b": 20.0 + storage.iter, "c": 0.0})
        assert [value for value, _ in storage.history("b").values()] == [
            value for iter in range(6) for value in (-iter, 10.0 + iter, 20.0 + iter)
        ]
        assert storage.history("a").values() == [(iter, iter) for iter in range(6)]


def test_other_names_in_each_iteration_are_stored_too():
    with EventStorage() as storage:
        for storage.iter in range(3000):
            names = [f"x{bit}" for bit in range(12) if storage.iter >> bit & 1]
            put_row(storage, dict.fromkeys(names, storage.iter))
    for bit in range(12):
        expected = [(iter, iter) for iter in range(3000) if iter >> bit & 1]
        assert storage.history(f"x{bit}").values() == expected


@pytest.mark.parametrize("value", ["high", None, torch.ones(2), [1.0]])
def test_a_value_that_is_no_number_is_refused_by_the_name_of_its_scalar(value):
    with pytest.raises(ValueError, match=f"scalar 'acc' must be one number .*, got {type(value).__name__}"):
        put_row(EventStorage(), {"loss": 1.0, "acc": value})


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="must be text, got 1; use str"):
        EventStorage().put_scalar(1, 0.5)


def test_a_lone_surrogate_in_a_name_ends_no_run_and_every_writer_shows_it_escaped(tmp_path, caplog):
    writers = [
        CommonMetricPrinter(),
        JSONWriter(tmp_path / "metrics.json"),
        CSVWriter(tmp_path / "metrics.csv"),
        TensorboardXWriter(tmp_path),
    ]
    with EventStorage() as storage, caplog.at_level("INFO"):
        storage.put_scalar("bad\ud800", 1.0)
        storage.put_scalar("bad\ud801", 2.0)
        storage.put_image("drawn\udfff", torch.zeros(3, 2, 2))
        for writer in writers:
            writer.write()
            writer.close()
    assert storage.history("bad\ud800").latest() == 1.0
    assert r"bad\ud800: 1  bad\ud801: 2" in caplog.text
    (line,) = (tmp_path / "metrics.json").read_text().splitlines()
    assert json.loads(line) == {"iteration": 0, r"bad\ud800": 1.0, r"bad\ud801": 2.0}
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1:] == [r"0,,bad\ud800,1.0", r"0,,bad\ud801,2.0"]
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert all(name in events.read_bytes() for name in (rb"bad\ud800", rb"drawn\udfff"))


def test_a_storage_that_is_loaded_forgets_what_was_put_before():
    storage = EventStorage()
    storage.put_scalar("x", 1.0)
    storage.load_state_dict(EventStorage().state_dict())
    storage.put_scalar("x", 2.0)
    assert storage.latest_with_smoothing_hint() == {"x": (2.0, 0)}


@pytest.mark.parametrize("name", ["iteration", "epoch"])
def test_a_name_that_writers_use_themselves_is_refused(name):
    with pytest.raises(ValueError, match=f"{name!r} is a name that writers use"):
        EventStorage().put_scalar(name, 1.0, epoch=1)


def test_the_epoch_of_a_name_is_that_of_its_newest_value():
    storage = EventStorage()
    storage.put_scalar("top1", 1.0, epoch=3)
    assert storage.epochs() == {"top1": 3}
    storage.put_scalar("top1", 2.0)
    assert storage.epochs() == {}


def test_a_storage_that_is_opened_inside_a_late_call_is_the_innermost_one():
    found = []

    def evaluate():
        with EventStorage() as inner:
            get_event_storage().put_scalar("inner", 1.0)
        found.append(inner.latest())
        get_event_storage().put_scalar("outer", 2.0)

    with EventStorage() as storage:
        storage.publish(evaluate)
        assert found == [{"inner": (1.0, 0)}]
        assert storage.latest() == {"outer": (2.0, 0)}
