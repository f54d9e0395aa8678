"""The metrics file of a run that was killed and goes on, and of one whose disk is full."""

import io
import math
import re
import resource
import shutil

import pytest
import torch

from trainkit.checkpoint.state import plain_state
from trainkit.utils.events import EventStorage, JSONWriter


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


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.json"


@pytest.fixture
def expected(tmp_path):
    """What an uninterrupted run of 20 iterations writes."""
    writer = JSONWriter(tmp_path / "whole" / "metrics.json")
    train(EventStorage(), writer, range(20))
    writer.close()
    return (tmp_path / "whole" / "metrics.json").read_bytes()


@pytest.mark.parametrize("state_at", [0, 1, 3, 7, 12, 19])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_the_file_of_a_resumed_run_is_byte_for_byte_that_of_an_uninterrupted_one(path, expected, state_at, extra):
    kill_and_resume(path, state_at, min(state_at + extra, 20))

    assert path.read_bytes() == expected


def test_lines_are_there_twice_if_no_state_is_loaded(path, expected):
    kill_and_resume(path, 7, 12, load=False)

    assert path.read_bytes() != expected


def test_lines_that_are_cut_off_are_kept_in_a_new_file_each_time(path, caplog):
    caplog.set_level("INFO")
    writer = JSONWriter(path)
    train(EventStorage(), writer, range(10))
    writer.close()
    before = path.read_text().splitlines(keepends=True)
    for n in (1, 2):
        writer = JSONWriter(path)
        writer.load_state_dict({"length": len(before[0]), "taken": {}, "pending": []})  # as earlier versions wrote it
        assert len(names(path.parent)) == n  # nothing is touched before the first write
        with EventStorage(start_iter=n) as storage:
            storage.put_scalar("lr", 1.0)
            writer.write()
            writer.close()

    assert names(path.parent) == ["metrics.json", "metrics.json.cut_1", "metrics.json.cut_2"]
    assert path.with_suffix(".json.cut_1").read_text() == "".join(before[1:])
    assert path.with_suffix(".json.cut_2").read_text() == '{"iteration": 1, "lr": 1.0}\n'
    assert path.read_text() == before[0] + '{"iteration": 2, "lr": 1.0}\n'
    assert caplog.messages == [
        f"{path} continues after byte {len(before[0])}; the later lines are in metrics.json.cut_{n}" for n in (1, 2)
    ]


def test_nothing_is_kept_if_there_is_nothing_to_cut_off(path):
    kill_and_resume(path, 7, 7)

    assert names(path.parent) == ["metrics.json"]


def test_a_line_that_the_kill_has_left_incomplete_is_cut_off(path, expected):
    kill_and_resume(path, 7, 12, meanwhile=lambda: path.write_bytes(path.read_bytes()[:-5]))

    assert path.read_bytes() == expected


def test_a_file_that_is_gone_starts_again(path):
    kill_and_resume(path, 7, 7, meanwhile=path.unlink)

    assert path.read_bytes().splitlines()[0] == b'{"epoch": 1, "iteration": 7, "top1": 7.0}'


def test_loading_makes_and_cuts_no_file(tmp_path):
    state = {"length": 0, "taken": {}}
    writer = JSONWriter(tmp_path / "none.json")
    writer.load_state_dict(state)
    writer.close()
    (tmp_path / "metrics.json").write_text("old\n")
    writer = JSONWriter(tmp_path / "metrics.json")
    writer.load_state_dict(state)

    assert writer.state_dict() == state  # a checkpoint before the first write
    assert (names(tmp_path), (tmp_path / "metrics.json").read_text()) == (["metrics.json"], "old\n")


def test_a_writer_that_was_closed_and_gets_its_state_back_goes_on_in_the_same_process(path, expected):
    writer, storage = JSONWriter(path), EventStorage()
    train(storage, writer, range(7))
    state = writer.state_dict()
    with storage:
        writer.write()  # the values at the stop, for the user to see
    writer.close()
    assert path.read_bytes() != expected[: state["length"]]
    writer.load_state_dict(state)
    train(storage, writer, range(7, 20))
    writer.close()

    assert path.read_bytes() == expected


def test_a_file_that_is_deleted_during_the_run_is_an_error_of_the_next_write(path):
    writer, storage = JSONWriter(path), EventStorage()
    train(storage, writer, range(10))
    shutil.rmtree(path.parent)
    with pytest.raises(FileNotFoundError, match=r"metrics\.json was deleted"):
        train(storage, writer, range(10, 20))
    writer.close()

    assert not path.parent.exists()


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
def test_a_write_without_room_leaves_no_part_of_a_line_and_the_next_one_has_the_newest_values(
    path, expected, file_size, room
):
    writer, storage = JSONWriter(path), EventStorage()
    train(storage, writer, range(6))
    good = path.read_bytes()

    file_size(len(good) + room)
    with pytest.raises(OSError, match="File too large"):
        train(storage, writer, range(6, 9))
    assert path.read_bytes() == good
    file_size(None)
    train(storage, writer, range(9, 20))
    writer.close()

    lines = expected.splitlines(keepends=True)
    assert path.read_bytes() == b"".join(line for line in lines if not re.search(rb'"iteration": [78]\b', line))


def test_a_tail_without_room_stays_where_it_is(path, file_size):
    old = '{"iteration": 0}\n' + '{"iteration": 1}\n' * 99
    path.parent.mkdir()
    path.write_text(old)
    writer = JSONWriter(path)
    writer.load_state_dict({"length": 17, "taken": {}})
    with EventStorage(start_iter=1) as storage:
        storage.put_scalar("a", 1.0)
        file_size(500)
        with pytest.raises(OSError, match="File too large"):
            writer.write()
        assert path.read_text() == old
        file_size(None)
        writer.write()
        writer.close()

    assert path.with_suffix(".json.cut_2").read_text() == old[17:]
    assert path.read_text() == '{"iteration": 0}\n{"a": 1.0, "iteration": 1}\n'
