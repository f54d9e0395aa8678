import math
import threading

import numpy as np
import pytest
import torch

from tests.engine.tiny import through_a_file
from trainkit.utils.events import EventStorage, get_event_storage, has_event_storage


def test_the_innermost_open_storage_is_found_until_it_is_closed():
    with EventStorage() as outer:
        assert get_event_storage() is outer
        inner = EventStorage()
        with pytest.raises(KeyError), inner:
            get_event_storage().history("none")
        assert get_event_storage() is outer
        assert has_event_storage()
    assert not has_event_storage()
    with pytest.raises(
        RuntimeError,
        match=r"no EventStorage is open; .*`with EventStorage\(\):`.*has_event_storage",
    ):
        get_event_storage()


def test_scalars_are_kept_with_the_iteration_in_which_they_were_put_and_others_refused_at_once():
    storage = EventStorage(start_iter=3)
    storage.put_scalar("loss", torch.tensor(2))
    storage.iter = 7
    storage.put_scalars(loss=4, lr=0.5)
    storage.step()
    storage.put_scalar("late", np.array([[1.0]]), cur_iter=5)
    for value in ("high", None, torch.ones(2), np.ones(2), np.ones(0), [1.0]):
        with pytest.raises(ValueError, match="scalar 'loss' must be one number"):
            storage.put_scalar("loss", value)
    with pytest.raises(ValueError, match="'lr' .*smoothing_hint=True"):
        storage.put_scalar("lr", 2.0, smoothing_hint=False)
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        storage.put_scalar("loss", 1.0, cur_iter=1.5)
    with pytest.raises(TypeError, match="can only concatenate str"):
        storage.put_scalar(1, 0.5)
    with pytest.raises(ValueError, match="'iteration' is a name that writers use"):
        storage.put_scalar("iteration", 1.0)
    assert storage.history("loss").values() == [(2.0, 3), (4.0, 7)]
    assert storage.latest() == {"loss": (4.0, 7), "lr": (0.5, 7), "late": (1.0, 5)}
    assert storage.iter == 8
    assert storage.iteration == 8
    assert type(storage.history("loss").values()[0][0]) is float
    with pytest.raises(
        KeyError, match=r"no scalar is called 'c'; there are \['late', 'loss', 'lr'\]"
    ):
        storage.history("c")


def test_smoothing_is_the_median_over_the_last_iterations_and_not_over_the_last_values():
    storage = EventStorage()
    for storage.iter in range(60):
        storage.put_scalar("each", storage.iter)
        if storage.iter % 10 == 9:
            storage.put_scalar("tenth", storage.iter)  # 9, 19, ..., 59
        storage.put_scalar("lr", storage.iter, smoothing_hint=False)
    storage.iter = 1000
    storage.put_scalar("new", 5.0)  # a window ends at the newest value of its own name
    smoothed = storage.latest_with_smoothing_hint(20)
    assert smoothed == {
        "each": (49.5, 59),
        "tenth": (54.0, 59),
        "lr": (59.0, 59),
        "new": (5.0, 1000),
    }
    assert storage.count_samples("each", 20) == 20
    assert storage.count_samples("tenth", 20) == 2
    assert storage.count_samples("tenth", 21) == 3
    assert storage.smoothing_hints() == {"each": True, "tenth": True, "lr": False, "new": True}


def test_histories_and_what_waits_are_bounded_and_the_global_average_is_of_all():
    storage = EventStorage(history_length=100)
    for storage.iter in range(3000):
        storage.put_scalar("loss", storage.iter)
    assert len(storage.rows) < 1000
    assert storage.history("loss").values() == [(float(i), i) for i in range(2900, 3000)]
    assert storage.history("loss").global_avg() == 1499.5


@pytest.mark.parametrize("with_worker", [False, True])
def test_rows_that_share_names_keep_the_order_in_which_they_were_put(with_worker):
    with EventStorage() as storage:
        if with_worker:
            storage.start_worker()
        for storage.iter in range(3000):
            storage.put_scalar("b", -storage.iter)
            storage.put_scalar("b", 10.0 + storage.iter)
            # other names in each iteration
            storage.put_scalar(f"bit{storage.iter % 3}", storage.iter)
        pairs = [value for iter in range(3000) for value in ((-iter, iter), (10.0 + iter, iter))]
        assert storage.history("b").values() == pairs
        assert storage.history("bit1").values() == [(iter, iter) for iter in range(1, 3000, 3)]


def test_images_and_histograms_that_no_writer_takes_are_bounded():
    storage, picture = EventStorage(), torch.rand(3, 2, 2)
    for storage.iter in range(150):
        storage.put_image("image", picture)
        storage.put_histogram("histogram", torch.zeros(1), bins=1)
    newest = list(range(50, 150))
    assert [image.iter for image in storage.images()] == newest
    assert storage.images()[0].name == "image"
    assert storage.images()[0].tensor is picture
    assert [histogram.iter for histogram in storage.histograms()] == newest
    storage.clear_images()
    storage.clear_histograms()
    assert storage.images() == []
    assert storage.histograms() == []


def test_a_histogram_of_a_tensor_of_any_shape_counts_every_element():
    storage = EventStorage(start_iter=9)
    storage.put_histogram("weight", torch.arange(6.0, requires_grad=True).reshape(3, 2), bins=5)
    [histogram] = storage.histograms()
    assert histogram.name == "weight"
    assert histogram.iter == 9
    numbers = {"min": 0.0, "max": 5.0, "num": 6, "sum": 15.0, "sum_squares": 55.0}
    buckets = {
        "bucket_limits": [1.0, 2.0, 3.0, 4.0, 5.0],
        "bucket_counts": [1.0, 1.0, 1.0, 1.0, 2.0],
    }
    assert histogram.raw == numbers | buckets


def test_a_histogram_is_of_the_finite_values_and_says_its_name_where_there_are_others(caplog):
    nan, inf = math.nan, math.inf
    storage = EventStorage()
    storage.put_histogram("some", torch.tensor([[nan, 1.0, inf], [3.0, -inf, 2.0]]), bins=2)
    storage.put_histogram("some", np.array([1e300, 0.0]), bins=1)  # not finite in float32
    for nothing in (torch.ones(0), torch.tensor([nan, inf]), np.zeros((3, 0))):
        storage.put_histogram("none", nothing)
    first, second = storage.histograms()
    assert first.raw == {
        "min": 1.0,
        "max": 3.0,
        "num": 3,
        "sum": 6.0,
        "sum_squares": 14.0,
        "bucket_limits": [2.0, 3.0],
        "bucket_counts": [1.0, 2.0],
    }
    assert second.name == "some"
    assert second.raw["num"] == 1
    assert second.raw["sum"] == 0.0
    some, nothing_left, none = caplog.messages
    assert "'some' leaves out values" in some
    assert "'none' has no finite value" in nothing_left
    assert "'none' leaves out values" in none
    for wrong in (torch.ones(2, dtype=torch.complex64), ["a"], None):
        with pytest.raises(ValueError, match="histogram 'wrong' "):
            storage.put_histogram("wrong", wrong)
    with pytest.raises(ValueError, match=r"histogram 'wrong' needs at least 1 bin, got bins=0"):
        storage.put_histogram("wrong", torch.ones(2), bins=0)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, 4),
        torch.zeros(5, 4, 3),
        torch.zeros(1, 3, 4, 4),
        torch.zeros(2, 4, 4),
        torch.zeros(3, 0, 4),
        torch.zeros(0),
        torch.zeros(3, 4, 4, dtype=torch.int64),
        torch.zeros(3, 2, 2, dtype=torch.complex64),
        np.zeros((4, 4)),
        None,
        "picture",
    ],
)
def test_an_image_of_another_shape_or_type_is_refused_by_its_name(wrong):
    storage = EventStorage()
    with (
        pytest.raises(ValueError, match="image 'head/wrong' .*(accepted: |must be a tensor)"),
        storage.name_scope("head"),
    ):
        storage.put_image("wrong", wrong)
    assert storage.images() == []


def test_pixels_that_are_not_finite_are_shown_as_0_or_1_and_the_image_is_named(caplog):
    storage = EventStorage()
    image = torch.tensor([math.nan, math.inf, -math.inf, 0.25]).reshape(1, 2, 2)
    for given in (image, image.numpy(), image.bfloat16(), image > 0):
        storage.put_image("image", given)
    expected = [0.0, 1.0, 0.0, 0.25]
    shown = [each.tensor.flatten().tolist() for each in storage.images()]
    assert shown == [expected, expected, expected, [0.0, 1.0, 0.0, 1.0]]
    assert image.isnan().any()  # the caller's is left as it is
    [text] = caplog.messages
    assert "'image'" in text
    assert "not finite" in text


def test_name_scope_applies_to_scalars_images_and_histograms_and_is_left_by_an_exception():
    storage = EventStorage()
    with storage.name_scope("head/"):
        with pytest.raises(KeyError), storage.name_scope("inner"):
            raise KeyError
        storage.put_scalar("loss", 1.0)
        storage.put_image("image", torch.zeros(1, 1, 1))
        storage.put_histogram("histogram", torch.zeros(1))
    storage.put_scalar("loss", 2.0)
    assert storage.latest() == {"head/loss": (1.0, 0), "loss": (2.0, 0)}
    assert [storage.images()[0].name, storage.histograms()[0].name] == [
        "head/image",
        "head/histogram",
    ]


def put_and_publish(with_worker):
    """What a reader that is published every third iteration sees, and what is stored in the end."""
    seen = []
    with EventStorage(history_length=12) as storage:
        if with_worker:
            storage.start_worker()

        def read():
            here = get_event_storage()
            seen.append(
                (
                    here.iter,
                    here.latest_with_smoothing_hint(4),
                    [image.iter for image in here.images()],
                )
            )
            here.clear_images()
            with EventStorage() as inner:  # the innermost one
                get_event_storage().put_scalar("inner", 1.0)
            here.put_scalar("eta", float(here.iter + len(inner.latest())), smoothing_hint=False)

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
        storage.start_worker()
        storage.put_scalar("loss", 1.0)
        storage.publish(lambda: go.wait(120) and get_event_storage().put_scalar("late", 1.0))
        storage.publish(
            lambda: seen.append((get_event_storage().iter, get_event_storage().latest()))
        )
        storage.iter = 1
        storage.put_scalar("loss", 2.0)
        assert seen == []
        with EventStorage() as meanwhile:
            go.set()
            assert storage.latest() == {"loss": (2.0, 1), "late": (1.0, 0)}
    assert seen == [(0, {"loss": (1.0, 0), "late": (1.0, 0)})]
    assert meanwhile.latest() == {}
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("trainkit-metrics")
    ]


def test_the_first_error_of_a_worker_is_raised_once_and_what_follows_is_stored(caplog):
    def fail(message):
        raise OSError(message)

    def run(error=None):
        with EventStorage() as storage:
            storage.start_worker()
            storage.publish(lambda: fail("unseen"))
            if error is not None:
                raise error

    with EventStorage() as storage:
        storage.start_worker()
        storage.publish(lambda: fail("first"))
        storage.publish(lambda: fail("second"))
        storage.put_scalar("loss", 1.0)
        with pytest.raises(OSError, match="first"):
            storage.flush()
        storage.worker.raise_error()
        assert storage.latest() == {"loss": (1.0, 0)}
    with pytest.raises(OSError, match="unseen"):  # when the storage is closed
        run()
    with pytest.raises(KeyError):  # it hides no other
        run(KeyError())
    assert "unseen" in caplog.text


@pytest.mark.parametrize("with_worker", [False, True])
def test_images_that_no_reader_clears_or_that_are_held_stay_in_their_order(with_worker):
    def hold(storage):
        with storage.hold_images():
            storage.clear_images()
            storage.clear_histograms()

    with EventStorage() as storage:
        if with_worker:
            storage.start_worker()
        for iter in (4, 9, 14):
            put(storage, [iter])
            storage.publish(lambda: hold(storage) if storage.iter == 4 else None)
        assert [image.iter for image in storage.images()] == [4, 9, 14]
        assert len(storage.histograms()) == 3


class Picture(torch.Tensor):
    pass


def put(storage, iters):
    for storage.iter in iters:
        storage.put_scalars(loss=math.sin(storage.iter), tiny=0.1 / (storage.iter + 1))
        storage.put_scalar("lr", 0.1 * storage.iter, smoothing_hint=False)
        storage.put_scalar("bad", [math.nan, math.inf, -math.inf, 1.0][storage.iter % 4])
        if storage.iter % 5 == 4:
            storage.put_scalar("top1", storage.iter, smoothing_hint=False)
            image = torch.full((1, 2, 2), storage.iter / 10)
            storage.put_image(
                "image", [image, image.numpy(), image.as_subclass(Picture)][storage.iter // 5 % 3]
            )
            storage.put_histogram("histogram", torch.arange(3.0) * storage.iter, bins=3)


def read_all(storage):
    """Everything that hooks and writers read; NaN equals NaN in a repr."""
    of_name = [
        (name, storage.count_samples(name, 7), history.values(), history.global_avg().hex())
        for name, history in storage.histories().items()
    ]
    images = [(image.name, image.tensor.tolist(), image.iter) for image in storage.images()]
    smoothed = storage.latest_with_smoothing_hint(7), storage.smoothing_hints()
    return repr([storage.latest(), *smoothed, of_name, images, storage.histograms()])


@pytest.mark.parametrize("with_worker", [False, True])
def test_a_storage_goes_on_bit_for_bit_after_a_round_trip(with_worker):
    with EventStorage(history_length=12) as first, EventStorage(9, history_length=12) as second:
        if with_worker:
            first.start_worker()
            second.start_worker()
        put(first, range(33))
        second.put_scalars(other=1.0, loss=2.0)
        second.put_image("other", torch.zeros(1, 1, 1))

        state = first.state_dict()
        second.load_state_dict(through_a_file(state))

        # the iteration is the loop's
        assert read_all(second) == read_all(first)
        assert second.iter == 9
        put(first, range(33, 41))
        assert read_all(second) != read_all(first)
        put(second, range(33, 41))
        assert read_all(second) == read_all(first)
        second.load_state_dict(state)  # it did not change when the storage went on
        assert second.latest()["loss"] == (math.sin(32), 32)


def test_a_loaded_storage_keeps_its_own_length_and_the_smoothing_hints_that_were_used():
    first = EventStorage()
    put(first, range(10))
    second = EventStorage(history_length=2)
    second.load_state_dict(first.state_dict())
    assert second.history("lr").values() == first.history("lr").values()[-2:]
    with pytest.raises(ValueError, match="'lr' was put with smoothing_hint=False"):
        second.put_scalar("lr", 1.0)
