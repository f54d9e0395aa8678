"""Writers of a run that was killed and goes on."""

import io
import math
import resource
import shutil
import tempfile

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from trainkit.checkpoint.state import plain_state
from trainkit.utils.events import (
    CommonMetricPrinter,
    CSVWriter,
    EventStorage,
    EventWriter,
    JSONWriter,
    TensorboardXWriter,
)

pytestmark = pytest.mark.usefixtures("seconds")


def through_a_file(state):
    file = io.BytesIO()
    torch.save(plain_state(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(storage, writer, iters):
    """A write after every third iteration."""
    with storage:
        for storage.iter in iters:
            storage.put_scalar("loss", math.nan if storage.iter == 3 else math.sin(storage.iter))
            storage.put_scalar("lr", storage.iter / 10, smoothing_hint=False)
            if storage.iter % 4 == 3:
                storage.put_scalar("top1", storage.iter, smoothing_hint=False, epoch=storage.iter // 4)
            if storage.iter % 3 == 2:
                writer.write()


def kill_and_resume(make, state_at, killed_at, length, *, load=True, meanwhile=lambda: None):
    """A run of ``length`` iterations whose state is taken and which goes on for a while before it is killed."""
    first, first_storage = make(), EventStorage()
    train(first_storage, first, range(state_at))
    state = through_a_file({"writer": first.state_dict(), "storage": first_storage.state_dict()})
    train(first_storage, first, range(state_at, killed_at))
    first.close()  # writes nothing
    meanwhile()
    second, second_storage = make(), EventStorage()
    second_storage.load_state_dict(state["storage"])
    if load:
        second.load_state_dict(state["writer"])
    train(second_storage, second, range(state_at, length))
    second.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------------- JSON


@pytest.fixture
def expected(tmp_path):
    """What an uninterrupted run of 20 iterations writes."""
    writer = JSONWriter(tmp_path / "whole" / "metrics.json")
    train(EventStorage(), writer, range(20))
    writer.close()
    return (tmp_path / "whole" / "metrics.json").read_bytes()


@pytest.mark.parametrize("state_at", [0, 1, 3, 7, 12, 19])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_json_of_a_resumed_run_is_byte_for_byte_that_of_an_uninterrupted_one(tmp_path, expected, state_at, extra):
    path = tmp_path / "metrics.json"
    kill_and_resume(lambda: JSONWriter(path), state_at, min(state_at + extra, 20), 20)

    assert path.read_bytes() == expected


def test_json_has_lines_twice_where_no_state_is_loaded(tmp_path, expected):
    path = tmp_path / "metrics.json"
    kill_and_resume(lambda: JSONWriter(path), 7, 12, 20, load=False)

    lines = path.read_bytes().splitlines()
    assert set(expected.splitlines()) < set(lines) or len(lines) > len(set(lines))
    assert path.read_bytes() != expected


def test_json_keeps_what_it_cuts_off_in_a_new_file_each_time_and_says_where(tmp_path, caplog):
    path = tmp_path / "metrics.json"
    caplog.set_level("INFO")
    kill_and_resume(lambda: JSONWriter(path), 6, 10, 6)
    assert names(tmp_path) == ["metrics.json"]  # nothing is touched before the first write
    before = path.read_text().splitlines(keepends=True)
    kill_and_resume(lambda: JSONWriter(path), 0, 0, 6)  # another run, behind the first
    assert names(tmp_path) == ["metrics.json"]

    for n in (1, 2):
        writer = JSONWriter(path)
        writer.load_state_dict({"length": len(before[0]), "taken": {}, "pending": []})
        with EventStorage(start_iter=n) as storage:
            storage.put_scalar("lr", 1.0)
            writer.write()
            writer.close()
    assert names(tmp_path) == ["metrics.json", "metrics.json.cut_1", "metrics.json.cut_2"]
    assert (tmp_path / "metrics.json.cut_1").read_text().startswith("".join(before[1:]))
    assert (tmp_path / "metrics.json.cut_2").read_text() == '{"iteration": 1, "lr": 1.0}\n'
    assert path.read_text() == before[0] + '{"iteration": 2, "lr": 1.0}\n'
    assert caplog.messages == [
        f"{path} continues after byte {len(before[0])}; the lines that were there are in metrics.json.cut_{n}"
        for n in (1, 2)
    ]


def test_json_leaves_no_file_beside_where_there_is_nothing_to_cut_off(tmp_path, expected):
    path = tmp_path / "run" / "metrics.json"
    kill_and_resume(lambda: JSONWriter(path), 7, 7, 20)

    assert (names(path.parent), path.read_bytes()) == (["metrics.json"], expected)


def test_json_cuts_off_a_line_that_the_kill_has_left_incomplete(tmp_path, expected):
    path = tmp_path / "metrics.json"

    def tear():
        path.write_bytes(path.read_bytes()[:-5])

    kill_and_resume(lambda: JSONWriter(path), 7, 12, 20, meanwhile=tear)
    assert path.read_bytes() == expected


@pytest.mark.parametrize(("left", "kept"), [(40, 0), (0, 0), (200, 1)])
def test_json_that_has_become_shorter_goes_on_behind_its_last_whole_line_with_a_warning(
    tmp_path, expected, caplog, left, kept
):
    path = tmp_path / "metrics.json"
    lines = expected.splitlines(keepends=True)
    left = min(left, len(lines[0]) + 10)

    def lose():
        path.write_bytes(path.read_bytes()[:left])

    kill_and_resume(lambda: JSONWriter(path), 7, 7, 20, meanwhile=lose)
    behind = [line for line in lines if int(line.split(b'"iteration": ')[1].split(b",")[0].rstrip(b"}\n")) > 6]
    assert path.read_bytes().splitlines(keepends=True) == lines[:kept] + behind
    assert f"{path} has {left} of the" in caplog.text
    assert "the missing lines are lost" in caplog.text


def test_json_that_has_gone_is_begun_anew_with_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.json"
    kill_and_resume(lambda: JSONWriter(path), 7, 7, 20, meanwhile=path.unlink)

    assert path.read_bytes().splitlines()[0] == b'{"epoch": 1, "iteration": 7, "top1": 7.0}'
    assert f"{path} has 0 of the" in caplog.text


def test_json_of_another_run_is_moved_aside_whole(tmp_path, caplog):
    path, other = tmp_path / "metrics.json", '{"iteration": 7, "other": 1}\n' * 99

    kill_and_resume(lambda: JSONWriter(path), 7, 7, 20, meanwhile=lambda: path.write_text(other))
    assert (tmp_path / "metrics.json.cut_1").read_text() == other
    assert "other" not in path.read_text()
    assert "bytes that this run has written, or other ones; the missing lines are lost" in caplog.text


def test_json_makes_and_cuts_no_file_by_loading(tmp_path):
    state = {"length": 0, "taken": {}, "pending": []}
    writer = JSONWriter(tmp_path / "none.json")
    writer.load_state_dict(state)
    writer.close()
    (tmp_path / "metrics.json").write_text("old\n")
    writer = JSONWriter(tmp_path / "metrics.json")
    writer.load_state_dict(state)

    assert writer.state_dict() == state  # a checkpoint before the first write
    assert (names(tmp_path), (tmp_path / "metrics.json").read_text()) == (["metrics.json"], "old\n")


def test_json_that_was_closed_and_gets_its_state_back_goes_on_in_the_same_process(tmp_path, expected):
    path = tmp_path / "metrics.json"
    writer, storage = JSONWriter(path), EventStorage()
    train(storage, writer, range(7))
    state = writer.state_dict()
    with storage:
        writer.write()  # what is there at the stop, for the user to see
    writer.close()
    assert path.read_bytes() != expected[: state["length"]]
    writer.load_state_dict(state)
    train(storage, writer, range(7, 20))
    writer.close()

    assert path.read_bytes() == expected


# ---------------------------------------------------------------------- files that somebody deletes


@pytest.mark.parametrize("kind", [JSONWriter, CSVWriter])
def test_a_text_file_that_is_deleted_is_written_again_as_a_whole(tmp_path, caplog, kind):
    paths = tmp_path / "whole" / "metrics", tmp_path / "deleted" / "metrics"
    for path in paths:
        writer, storage = kind(path), EventStorage()
        train(storage, writer, range(10))
        if path.parent.name == "deleted":
            shutil.rmtree(path.parent)
        train(storage, writer, range(10, 20))
        writer.close()

    assert paths[1].read_bytes() == paths[0].read_bytes()
    assert caplog.messages == [f"{paths[1]} was deleted during the run; all of it is written again"]


def test_json_goes_on_in_the_file_that_somebody_has_put_in_the_place_of_its_own(tmp_path, expected, caplog):
    path = tmp_path / "metrics.json"
    writer, storage = JSONWriter(path), EventStorage()
    train(storage, writer, range(10))
    path.unlink()
    path.write_text("")
    train(storage, writer, range(10, 20))
    writer.close()

    assert path.read_bytes() == b"".join(expected.splitlines(keepends=True)[-path.read_bytes().count(b"\n") :])
    assert caplog.messages == [f"{path} was replaced by another file; later lines are written to that file"]


@pytest.mark.parametrize("by_state", [False, True])
def test_tensorboards_events_that_are_deleted_come_back(tmp_path, caplog, by_state):
    folder = tmp_path / "run"
    writer, storage = TensorboardXWriter(folder), EventStorage()
    train(storage, writer, range(10))
    writer.state_dict()  # else TensorBoard's thread may still hold events, which then are lost
    shutil.rmtree(folder)
    if by_state:
        writer.state_dict()
    train(storage, writer, range(10, 20))
    writer.close()

    assert [event.step for event in shown(folder).Scalars("lr")] == [2, 5, 8, 11, 14, 17]
    assert caplog.messages == [f"TensorBoard's events in {folder} were deleted during the run; they are written again"]


# ---------------------------------------------------------------------- a disk without room


@pytest.fixture
def file_size():
    """Sets how many bytes a file of this process may have; ``None``: as many as before."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, before if bytes is None else (bytes, before[1]))

    yield limit
    limit(None)


@pytest.mark.parametrize("room", [0, 5, 10])
def test_json_writes_later_what_found_no_room_and_leaves_no_part_of_a_line(tmp_path, expected, file_size, room):
    path = tmp_path / "metrics.json"
    writer, storage = JSONWriter(path), EventStorage()
    train(storage, writer, range(6))
    good = path.read_bytes()

    file_size(len(good) + room)
    for iters in (range(6, 9), range(9, 12)):
        with pytest.raises(OSError, match="File too large"):
            train(storage, writer, iters)
        assert path.read_bytes() == good
    state = writer.state_dict()
    file_size(None)
    train(storage, writer, range(12, 20))
    assert path.read_bytes() == expected
    writer.close()

    resumed, storage = JSONWriter(path), EventStorage()
    resumed.load_state_dict(through_a_file(state))
    with storage:
        resumed.write()
        resumed.close()
    assert expected.startswith(path.read_bytes())
    assert b'"iteration": 11' in path.read_bytes()


def test_json_keeps_the_rows_of_two_hundred_writes_at_most(tmp_path):
    folder = tmp_path / "metrics"
    folder.write_text("a file where the folder should be")
    writer = JSONWriter(folder / "metrics.json")
    with EventStorage() as storage:
        for storage.iter in range(205):
            storage.put_scalar("a", 1.0)
            with pytest.raises(OSError, match="metrics"):
                writer.write()
        folder.unlink()
        writer.write()
        writer.close()

    lines = (folder / "metrics.json").read_text().splitlines()
    assert (len(lines), lines[0]) == (200, '{"a": 1.0, "iteration": 5}')


def test_a_tail_for_which_there_is_no_room_stays_where_it_is_until_there_is(tmp_path, file_size):
    path = tmp_path / "metrics.json"
    old = '{"iteration": 0}\n' + '{"iteration": 1}\n' * 99
    path.write_text(old)
    writer = JSONWriter(path)
    writer.load_state_dict({"length": 17, "taken": {}, "pending": []})
    with EventStorage(start_iter=1) as storage:
        storage.put_scalar("a", 1.0)
        file_size(500)
        with pytest.raises(OSError, match="File too large"):
            writer.write()
        assert (names(tmp_path), path.read_text()) == (["metrics.json"], old)
        file_size(None)
        writer.write()
        writer.close()

    assert (tmp_path / "metrics.json.cut_1").read_text() == old[17:]
    assert path.read_text() == '{"iteration": 0}\n{"a": 1.0, "iteration": 1}\n'


def test_tensorboard_goes_on_in_another_file_when_there_is_room_again(tmp_path, monkeypatch):
    writer, storage = TensorboardXWriter(tmp_path), EventStorage()
    real = tempfile.TemporaryFile

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainkit.utils.events.tensorboard_writer.tempfile.TemporaryFile", full)
    for iters in (range(3), range(3, 6)):
        with pytest.raises(OSError, match="No space left on device"):
            train(storage, writer, iters)
    assert names(tmp_path) == []
    monkeypatch.setattr("trainkit.utils.events.tensorboard_writer.tempfile.TemporaryFile", real)
    train(storage, writer, range(6, 9))
    writer.close()

    assert [event.step for event in shown(tmp_path).Scalars("lr")] == [2, 5, 8]


class Disk(SummaryWriter):
    full = False

    def add_scalar(self, *args):
        self.flush()
        super().add_scalar(*args)

    def flush(self):
        if Disk.full:
            raise OSError(28, "No space left on device")
        super().flush()


def test_tensorboard_lets_a_file_go_in_which_it_could_not_write(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Disk)
    writer, storage = TensorboardXWriter(tmp_path), EventStorage()
    train(storage, writer, range(3))
    monkeypatch.setattr(Disk, "full", True)
    with pytest.raises(OSError, match="No space left on device"):
        train(storage, writer, range(3, 6))
    monkeypatch.setattr(Disk, "full", False)
    train(storage, writer, range(6, 9))
    writer.close()

    assert len(names(tmp_path)) == 2
    assert [event.step for event in shown(tmp_path).Scalars("lr")] == [2, 5, 8]


def test_tensorboard_that_cannot_leave_its_events_with_the_system_says_so_and_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Disk)
    writer, storage = TensorboardXWriter(tmp_path), EventStorage()
    train(storage, writer, range(3))
    monkeypatch.setattr(Disk, "full", True)
    assert writer.state_dict()["last_step"] == 2
    monkeypatch.setattr(Disk, "full", False)
    train(storage, writer, range(3, 6))
    writer.close()

    assert caplog.messages == [
        f"TensorBoard has lost the newest events in {tmp_path}: [Errno 28] No space left on device"
    ]
    # TensorBoard's own thread may or may not have written step 2
    assert shown(tmp_path).Scalars("lr")[-1].step == 5


# ---------------------------------------------------------------------- TensorBoard


def shown(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def points(folder):
    events = shown(folder)
    return {tag: [(e.step, repr(e.value)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("state_at", [0, 7])
def test_tensorboard_shows_a_resumed_run_like_an_uninterrupted_one(tmp_path, state_at):
    kill_and_resume(lambda: TensorboardXWriter(tmp_path / "resumed"), state_at, 14, 20)
    kill_and_resume(lambda: TensorboardXWriter(tmp_path / "doubled"), state_at, 14, 20, load=False)
    whole = TensorboardXWriter(tmp_path / "whole")
    train(EventStorage(), whole, range(20))
    whole.close()

    expected = points(tmp_path / "whole")
    assert [step for step, _ in expected["lr"]] == [2, 5, 8, 11, 14, 17]
    assert points(tmp_path / "resumed") == expected
    assert points(tmp_path / "doubled")["lr"] != expected["lr"]


def test_tensorboard_shows_again_an_image_that_was_put_but_not_written_before_the_checkpoint(tmp_path):
    storage = EventStorage(start_iter=4)
    storage.put_image("image", torch.zeros(3, 2, 2))
    state = through_a_file(storage.state_dict())
    resumed, writer = EventStorage(start_iter=5), TensorboardXWriter(tmp_path)
    resumed.load_state_dict(state)
    writer.load_state_dict(through_a_file(writer.state_dict()))
    assert names(tmp_path) == []
    with resumed:
        writer.write()
        writer.close()

    assert [event.step for event in shown(tmp_path).Images("image")] == [4]


def test_the_state_of_tensorboard_leaves_its_events_with_the_operating_system(tmp_path):
    writer = TensorboardXWriter(tmp_path)
    train(EventStorage(), writer, range(6))
    writer.state_dict()

    assert [event.step for event in shown(tmp_path).Scalars("lr")] == [2, 5]
    writer.close()


# ---------------------------------------------------------------------- others


def test_the_console_and_a_writer_of_ones_own_have_no_state():
    class Mine(EventWriter):
        pass

    for writer in (CommonMetricPrinter(), Mine()):
        assert writer.state_dict() == {}
        writer.load_state_dict({})
    with pytest.raises(NotImplementedError, match=r"Mine saves a state \(a, b\) but has no load_state_dict"):
        Mine().load_state_dict({"a": 1, "b": 2})
