import io
import json
import math
import sys
import threading

import pytest
import torch

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


@pytest.mark.parametrize("defer", [False, True])
def test_the_epoch_of_a_name_is_that_of_its_newest_value(defer):
    with EventStorage(start_iter=4) as storage:
        if defer:
            storage.start_deferring()
        storage.put_scalar("top1", 50.0, epoch=1)
        storage.put_scalar("top5", 90.0, epoch=1)
        storage.put_scalar("loss", 1.0)
        assert storage.epochs() == {"top1": 1, "top5": 1}
        storage.put_scalar("top1", 60.0, epoch=2)
        storage.put_scalar("top5", 95.0)
        assert storage.epochs() == {"top1": 2}
        assert storage.latest() == {"top1": (60.0, 4), "top5": (95.0, 4), "loss": (1.0, 4)}


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


# ---------------------------------------------------------------------- deferring


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("trainkit-metrics")]


class Gate:
    """Holds up the worker of a deferring storage until it is opened."""

    def __init__(self, storage):
        self._opened = threading.Event()
        storage.put_later(self._wait)
        storage.publish(lambda: None)

    def _wait(self):
        assert self._opened.wait(10)

    def open(self):
        self._opened.set()

    def open_later(self):
        threading.Timer(0.05, self.open).start()


def put_this_and_that(storage):
    """A few iterations with everything that can be put, and a reader now and then."""
    seen = []
    for storage.iter in range(7):
        storage.put_scalar("early", storage.iter)
        with storage.name_scope("scope"):
            storage.put_scalars(a=storage.iter / 2, b=1.0)
            storage.put_image("image", torch.zeros(1, 1, 1))
            storage.put_later(lambda: get_event_storage().put_scalar("later", 2 * get_event_storage().iter))
        storage.put_later(lambda iter=storage.iter: get_event_storage().put_scalar("loss", -1.0, cur_iter=iter))
        storage.put_scalar("lr", 0.1, smoothing_hint=False)
        if storage.iter == 2:
            storage.clear_images()
        if storage.iter % 3 == 2:
            storage.publish(lambda: seen.append((get_event_storage().iter, get_event_storage().latest().copy())))
            storage.put_scalar("behind", storage.iter)
    return {
        "seen": seen,
        "histories": [(name, history.values()) for name, history in storage.histories().items()],
        "latest": storage.latest(),
        "hints": storage.smoothing_hints(),
        "images": [(image.name, image.iter) for image in storage.images()],
    }


def test_deferring_gives_the_same_histories_and_readers_the_same_values_as_direct_storing():
    with EventStorage() as direct:
        expected = put_this_and_that(direct)
    with EventStorage() as deferring:
        deferring.start_deferring()
        found = put_this_and_that(deferring)

    assert found == expected
    assert [iter for iter, _ in found["seen"]] == [2, 5]
    assert found["latest"]["scope/later"] == (12.0, 6)
    assert [iter for _, iter in found["images"]] == [3, 4, 5, 6]


def test_a_published_reader_sees_its_iteration_and_what_was_put_before_it():
    seen = []
    with EventStorage(start_iter=3) as storage:
        storage.start_deferring()
        gate = Gate(storage)
        storage.put_scalar("loss", 1.0)
        storage.publish(lambda: seen.append((get_event_storage().iter, get_event_storage().latest()["loss"])))
        storage.iter = 4
        storage.put_scalar("loss", 2.0)
        gate.open()
        assert storage.history("loss").values() == [(1.0, 3), (2.0, 4)]
        assert storage.iter == 4

    assert seen == [(3, (1.0, 3))]


def test_publishing_does_not_wait_for_the_reader():
    with EventStorage() as storage:
        storage.start_deferring()
        gate = Gate(storage)  # returns while the worker is held up
        storage.put_scalar("loss", 1.0)
        storage.raise_error()
        gate.open()


def test_without_deferring_everything_happens_at_once():
    calls = []
    with EventStorage() as storage:
        storage.put_later(calls.append, threading.current_thread())
        storage.publish(lambda: calls.append(threading.current_thread()))
        storage.raise_error()
        storage.flush()

        assert calls == [threading.main_thread()] * 2
        assert workers() == []


def test_a_storage_opened_meanwhile_gets_nothing_of_what_the_worker_puts():
    with EventStorage() as storage:
        storage.start_deferring()
        gate = Gate(storage)
        storage.put_later(lambda: get_event_storage().put_scalar("loss", 1.0))
        storage.publish(lambda: get_event_storage().put_scalar("eta", 2.0))
        with EventStorage() as throwaway:
            gate.open()
            storage.flush()
            get_event_storage().put_scalar("forward", 3.0)

    assert throwaway.latest() == {"forward": (3.0, 0)}
    assert storage.latest() == {"loss": (1.0, 0), "eta": (2.0, 0)}


def test_a_name_scope_of_the_loop_does_not_reach_what_the_worker_puts_meanwhile():
    with EventStorage() as storage:
        storage.start_deferring()
        gate = Gate(storage)
        storage.put_later(lambda: get_event_storage().put_scalar("loss", 1.0))
        storage.publish(lambda: None)
        with storage.name_scope("aux"):
            gate.open()
            storage.flush()

    assert list(storage.latest()) == ["loss"]


@pytest.mark.parametrize(
    "read",
    [
        lambda storage: storage.history("loss").latest(),
        lambda storage: storage.histories()["loss"].latest(),
        lambda storage: storage.latest()["loss"][0],
        lambda storage: storage.latest_with_smoothing_hint()["loss"][0],
        lambda storage: float(storage.count_samples("loss")),
        lambda storage: float(storage.smoothing_hints()["loss"]),
        lambda storage: storage.images()[0].tensor.item(),
        lambda storage: storage.histograms()[0].raw["max"],
    ],
    ids=["history", "histories", "latest", "smoothed", "count", "hints", "images", "histograms"],
)
def test_reading_waits_for_what_was_put(read):
    with EventStorage() as storage:
        storage.start_deferring()
        gate = Gate(storage)
        storage.put_scalar("loss", 1.0)
        storage.put_image("image", torch.ones(1, 1, 1))
        storage.put_histogram("histogram", torch.ones(1))
        storage.publish(lambda: None)
        gate.open_later()

        assert read(storage) == 1.0


def fail(message="no space left"):
    raise OSError(message)


def test_an_error_in_the_worker_is_raised_in_the_loop_once_and_what_follows_it_is_still_stored():
    with EventStorage() as storage:
        storage.start_deferring()
        storage.put_later(fail)
        storage.put_scalar("loss", 1.0)
        done = threading.Event()
        storage.publish(done.set)
        assert done.wait(10)

        with pytest.raises(OSError, match="no space left"):
            storage.raise_error()
        storage.raise_error()
        assert storage.latest() == {"loss": (1.0, 0)}


def test_the_first_of_several_errors_is_raised():
    with EventStorage() as storage:
        storage.start_deferring()
        storage.put_later(fail, "first")
        storage.put_later(fail, "second")

        with pytest.raises(OSError, match="first"):
            storage.flush()
        storage.flush()


def run_with_a_failing_writer(error=None):
    with EventStorage() as storage:
        storage.start_deferring()
        storage.publish(fail)
        if error is not None:
            raise error


def test_an_error_that_nobody_asked_for_is_raised_when_the_storage_is_closed():
    with pytest.raises(OSError, match="no space left"):
        run_with_a_failing_writer()

    assert workers() == []
    assert not has_event_storage()


def test_an_error_in_the_worker_does_not_hide_the_one_that_ends_the_loop(caplog):
    with pytest.raises(KeyError, match="loop"):
        run_with_a_failing_writer(KeyError("loop"))

    assert "Storing or writing metrics failed as well" in caplog.text
    assert workers() == []


def test_flush_waits_for_every_job_before_it_raises_the_error_of_one():
    done = []
    with EventStorage() as storage:
        storage.start_deferring()
        storage.publish(fail)
        gate = Gate(storage)
        storage.publish(lambda: done.append(True))
        gate.open_later()
        with pytest.raises(OSError, match="no space left"):
            storage.flush()

        assert done == [True]  # whoever closes a file now does not close it under the worker's hands


def test_memory_is_bounded_and_errors_show_where_nobody_ever_publishes():
    handed_over = threading.Event()
    with EventStorage() as storage:
        storage.start_deferring()
        storage.put_later(handed_over.set)
        for value in range(1000):
            storage.put_scalar("loss", value)

        assert handed_over.wait(10)


class ReadsTheStorage(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return get_event_storage().latest()["loss"][0]


def test_a_forked_loader_worker_reads_what_was_stored_before_the_fork_and_waits_for_nobody():
    with EventStorage() as storage:
        storage.start_deferring()
        storage.put_scalar("loss", 1.0)
        storage.flush()
        storage.put_scalar("loss", 2.0)
        loader = torch.utils.data.DataLoader(
            ReadsTheStorage(), num_workers=1, multiprocessing_context="fork", timeout=30
        )
        assert [batch.item() for batch in loader] == [1.0, 1.0]
        assert storage.latest()["loss"] == (2.0, 0)


def test_the_worker_is_gone_behind_the_with_block_and_a_second_one_defers_again():
    storage = EventStorage()
    for iteration in range(2):
        with storage:
            storage.start_deferring()
            storage.start_deferring()  # harmless
            storage.put_scalar("loss", iteration, cur_iter=iteration)
            storage.publish(lambda: None)
            assert len(workers()) == 1
        assert workers() == []

    storage.put_scalar("loss", 2, cur_iter=2)
    assert storage.history("loss").values() == [(0.0, 0), (1.0, 1), (2.0, 2)]


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


@pytest.mark.parametrize("defer", [False, True])
def test_a_storage_goes_on_bit_for_bit_after_a_round_trip(defer):
    with EventStorage(history_length=12) as first, EventStorage(history_length=12) as second:
        if defer:
            first.start_deferring()
            second.start_deferring()
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
    for defer in (False, True):
        with EventStorage() as storage:
            if defer:
                storage.start_deferring()
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


def test_without_a_worker_what_is_put_later_is_stored_at_once_and_in_this_storage():
    with EventStorage(3) as storage:
        with EventStorage() as other, storage.name_scope("early"):  # of an evaluation, say
            storage.put_later(lambda: get_event_storage().put_scalar("loss", 1.0))
            assert get_event_storage() is other
        storage.put_scalar("early/loss", 2.0)
        assert storage.history("early/loss").values() == [(1.0, 3), (2.0, 3)]
        assert other.latest() == {}
        with pytest.raises(OSError, match="no space left"):
            storage.put_later(fail)
        assert get_event_storage() is storage
        assert workers() == []


def test_a_row_is_stored_like_its_scalars_whatever_their_names_are():
    row = {"self": 1.0, "cur_iter": 2.0, "name": torch.tensor(3.0)}
    with EventStorage() as storage, storage.name_scope("scope"):
        storage.put_row(row, smoothing_hint=False, cur_iter=5, epoch=2)
    assert storage.latest() == {"scope/self": (1.0, 5), "scope/cur_iter": (2.0, 5), "scope/name": (3.0, 5)}
    assert set(storage.smoothing_hints().values()) == {False}
    assert storage.epochs() == dict.fromkeys(storage.latest(), 2)


@pytest.mark.parametrize("deferring", [False, True])
def test_rows_that_share_names_keep_the_order_in_which_they_were_put(deferring):
    with EventStorage() as storage:
        if deferring:
            storage.start_deferring()
        for storage.iter in range(6):
            storage.put_row({"a": storage.iter, "b": -storage.iter})
            storage.put_scalar("b", 10.0 + storage.iter)
            storage.put_row({"b": 20.0 + storage.iter, "c": 0.0})
        assert [value for value, _ in storage.history("b").values()] == [
            value for iter in range(6) for value in (-iter, 10.0 + iter, 20.0 + iter)
        ]
        assert storage.history("a").values() == [(iter, iter) for iter in range(6)]


def test_other_names_in_each_iteration_are_stored_too():
    with EventStorage() as storage:
        for storage.iter in range(3000):
            names = [f"x{bit}" for bit in range(12) if storage.iter >> bit & 1]
            storage.put_row(dict.fromkeys(names, storage.iter))
    for bit in range(12):
        expected = [(iter, iter) for iter in range(3000) if iter >> bit & 1]
        assert storage.history(f"x{bit}").values() == expected


def test_what_is_refused_leaves_nothing_behind():
    storage = EventStorage()
    with pytest.raises(ValueError, match="could not convert"):
        storage.put_row({"a": 1.0, "b": "text"})
    with pytest.raises(TypeError, match="interpreted as an integer"):
        storage.put_scalar("c", 1.0, epoch=0.5)
    storage.put_scalar("d", 1.0)
    with pytest.raises(ValueError, match="'d' was put with"):
        storage.put_row({"e": 1.0, "d": 2.0}, smoothing_hint=False)
    assert storage.latest() == {"d": (1.0, 0)}
    assert storage.smoothing_hints() == {"d": True}


@pytest.mark.parametrize("value", ["high", None, torch.ones(2), [1.0]])
def test_a_value_that_is_no_number_is_refused_by_the_name_of_its_scalar(value):
    with pytest.raises(ValueError, match=f"scalar 'acc' must be one number .*, got {type(value).__name__}"):
        EventStorage().put_row({"loss": 1.0, "acc": value})


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="must be text, got 1; use str"):
        EventStorage().put_scalar(1, 0.5)


def test_names_that_writers_use_themselves_are_refused_and_those_of_hooks_are_taken():
    storage = EventStorage()
    with pytest.raises(ValueError, match="'iteration' is the name under which writers show"):
        storage.put_scalar("iteration", 5.0)
    with pytest.raises(ValueError, match="'epoch' cannot have an epoch itself"):
        storage.put_scalar("epoch", 5.0, epoch=3)
    for name in ("epoch", "time", "eta_seconds", "lr"):
        storage.put_scalar(name, 1.0)
    with storage.name_scope("val"):
        storage.put_scalar("iteration", 2.0)
        storage.put_scalar("epoch", 3.0, epoch=1)
    assert list(storage.latest()) == ["epoch", "time", "eta_seconds", "lr", "val/iteration", "val/epoch"]


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


def test_another_thread_may_read_while_the_loop_puts():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    storage = EventStorage(history_length=100_000)
    errors, done = [], threading.Event()

    def read():
        while not done.is_set():
            try:
                storage.latest()
            except Exception as error:
                errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for storage.iter in range(5000):
        storage.put_scalar("x", storage.iter)
        storage.put_row({"y": 0.0, "z": 1.0})
        if storage.iter % 20 == 19:
            storage.latest()
    done.set()
    reader.join()
    sys.setswitchinterval(interval)
    assert errors == []
    assert storage.history("x").values() == [(iter, iter) for iter in range(5000)]


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
