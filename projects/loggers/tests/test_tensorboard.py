"""What TensorBoard shows, also of a run that was killed and resumed."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainkit.utils.events import EventStorage, TensorboardXWriter

pytestmark = pytest.mark.usefixtures("seconds")


def shown(folder):
    return EventAccumulator(str(folder), size_guidance={"images": 0, "histograms": 0}).Reload()


def points(folder):
    events = shown(folder)
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def train(storage, writer, iters):
    """A write after every third iteration; a picture after every second."""
    with storage:
        for storage.iter in iters:
            storage.put_scalar("lr", storage.iter / 8, smoothing_hint=False)
            if storage.iter % 2:
                storage.put_image("image", torch.full((3, 2, 2), storage.iter / 10))
                storage.put_histogram("weights", torch.arange(storage.iter + 1.0), bins=2)
            if storage.iter % 3 == 2:
                writer.write()


def test_scalars_images_and_histograms_are_written_and_let_go(tmp_path):
    logs = tmp_path / "logs"
    writer = TensorboardXWriter(logs, window_size=3, filename_suffix=".run")
    with EventStorage() as storage:
        writer.write()
        assert not logs.exists()  # no file before there is something to write
        for storage.iter, loss in enumerate([9.0, 1.0, 8.0, 2.0]):
            storage.put_scalar("loss", loss)
        storage.put_image("image", torch.zeros(3, 2, 4))
        storage.put_histogram("weight", torch.arange(6.0).reshape(3, 2), bins=2)
        writer.write()
        assert storage.images() == []
        assert storage.histograms() == []
        storage.put_scalar("late", 0.25, cur_iter=1)
        storage.put_scalar("top1", 50.0)
        writer.write()
        writer.state_dict()  # gives all events to the operating system
        before = points(logs)
        writer.close()

    assert points(logs) == before == {"loss": [(3, 2.0)], "late": [(1, 0.25)], "top1": [(3, 50.0)]}
    [image], [histogram] = shown(logs).Images("image"), shown(logs).Histograms("weight")
    assert image.step == 3
    assert image.width == 4
    assert image.height == 2
    counts = histogram.histogram_value
    assert histogram.step == 3
    assert counts.num == 6
    assert counts.sum == 15
    assert counts.sum_squares == 55
    assert counts.bucket_limit == [2.5, 5.0]
    assert counts.bucket == [3, 3]


@pytest.mark.parametrize(("kills", "load"), [(2, True), (1, False)])
def test_a_run_that_is_killed_and_resumed_shows_each_step_once(tmp_path, kills, load):
    whole = TensorboardXWriter(tmp_path / "whole")
    train(EventStorage(), whole, range(18))
    whole.close()
    out = tmp_path / "out"
    writer, storage = TensorboardXWriter(out), EventStorage()
    train(storage, writer, range(8))
    state, stored = writer.state_dict(), storage.state_dict()
    torch.save(state, tmp_path / "state")
    train(storage, writer, range(8, 12))
    writer.close()
    for kill in range(kills):
        writer, storage = TensorboardXWriter(out), EventStorage()
        storage.load_state_dict(stored)
        if load:
            writer.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        train(storage, writer, range(8, 15 + 3 * (kill + 1 == kills)))
        writer.close()

    assert (points(out) == points(tmp_path / "whole")) == load
    events, expected = shown(out), shown(tmp_path / "whole")
    for kind, tag in (("Images", "image"), ("Histograms", "weights")):
        steps = [[event.step for event in getattr(each, kind)(tag)] for each in (events, expected)]
        assert (steps[0] == steps[1]) == load
