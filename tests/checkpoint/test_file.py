import collections
import errno
import hashlib
import os
import random
import resource
import struct
from enum import IntEnum

import numpy as np
import pytest
import torch

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.atomic import remove_leftovers
from trainkit.checkpoint.file import is_ours, read_file, write_file

OLD, NEW = {"weight": torch.zeros(3)}, {"weight": torch.ones(3)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pth"


def test_state_comes_back_with_values_and_types(path):
    state = {
        "tensors": [torch.arange(3), torch.ones(2, dtype=torch.bfloat16), torch.zeros(2).to_sparse()],
        "plain": ("a", b"b", 1, 2.5, 1 + 2j, True, None, float("inf"), IntEnum("Sort", ["A"]).A),
        "torch": [torch.Size([1, 2]), torch.float16, torch.device("cpu")],
        "keys": collections.OrderedDict([("s", 1), (2, 2), (0.5, 3)]),
    }

    write_file(state, path)
    loaded = read_file(path)

    assert [tensor.dtype for tensor in loaded["tensors"]] == [torch.int64, torch.bfloat16, torch.float32]
    assert loaded["tensors"][0].tolist() == [0, 1, 2]
    assert {key: loaded[key] for key in ("plain", "torch", "keys")} == {
        key: state[key] for key in ("plain", "torch", "keys")
    }
    assert type(loaded["keys"]) is collections.OrderedDict
    assert loaded.keys() == state.keys()


def test_torch_load_reads_the_file(path):
    write_file(NEW, path)

    assert torch.equal(torch.load(path, weights_only=True)["weight"], NEW["weight"])


def test_version_numbers_of_submodules_are_kept(path):
    write_file({"model": torch.nn.BatchNorm1d(2).state_dict()}, path)

    assert read_file(path)["model"]._metadata[""] == {"version": 2}


def test_a_view_is_stored_without_the_rest_of_its_storage(path):
    write_file({"row": torch.zeros(1_000_000)[:10]}, path)

    assert path.stat().st_size < 10_000


def test_tied_weights_are_stored_once(path):
    tied = torch.zeros(100_000)

    write_file({"embedding": tied, "head": tied}, path)

    assert path.stat().st_size < 1.1 * 400_000


# ---------------------------------------------------------------------------------------- damage
def test_no_flipped_byte_loads_as_something_else(path):
    """Some flips are harmless: a zip archive has padding, and fields that nobody reads."""
    state = {"weight": torch.randn(500, generator=torch.Generator().manual_seed(0))}
    write_file(state, path)
    intact, rng = path.read_bytes(), random.Random(0)
    found = collections.Counter()

    for position in [*rng.sample(range(len(intact)), 300), *range(len(intact) - 60, len(intact))]:
        damaged = bytearray(intact)
        damaged[position] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            read_file(path)
            loaded = read_file(path)
        except CheckpointError:
            found["refused"] += 1
        else:
            assert loaded.keys() == state.keys()
            assert all(torch.equal(value, state[key]) for key, value in loaded.items())
            found["harmless"] += 1
        if is_changed_by_torch_load(path, state):
            found["wrong in torch.load"] += 1

    assert found["refused"] > 250
    assert found["wrong in torch.load"] > 100, "the negative control"


def is_changed_by_torch_load(path, state):
    try:
        return not torch.equal(torch.load(path, weights_only=True)["weight"], state["weight"])
    except Exception:
        return False


def test_every_truncation_is_detected(path):
    write_file(NEW, path)
    intact, rng = path.read_bytes(), random.Random(0)

    for length in [0, 1, *rng.sample(range(len(intact)), 200), *range(len(intact) - 60, len(intact))]:
        path.write_bytes(intact[:length])
        with pytest.raises(CheckpointError, match=r"model\.pth"):
            read_file(path)


def test_a_file_of_the_first_version_is_read(path):
    """It has its length and its digest behind the archive."""
    write_file(NEW, path)
    content = path.read_bytes()
    trailer = struct.pack("<8sIQ32s", b"TRAINKIT", 1, len(content), hashlib.sha256(content).digest())
    path.write_bytes(content + trailer)
    read_file(path)
    assert is_ours(path)
    assert torch.equal(read_file(path)["weight"], NEW["weight"])


def test_only_our_files_say_so(path, tmp_path):
    write_file(NEW, path)
    torch.save(NEW, tmp_path / "plain.pth")

    assert is_ours(path)
    assert not is_ours(tmp_path / "plain.pth")
    assert not is_ours(tmp_path / "missing.pth")
    read_file(tmp_path / "plain.pth")


# ---------------------------------------------------------------------------------------- reading
def test_refused_file_names_the_type_and_recommends_nothing_unsafe(path):
    torch.save({"best": np.float64(1)}, path)

    with pytest.raises(CheckpointError, match=r"it needs numpy\S+scalar") as caught:
        read_file(path)
    assert "weights_only" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_file_that_holds_no_dict_is_an_error(path):
    torch.save(torch.zeros(2), path)

    with pytest.raises(CheckpointError, match="holds a Tensor; a checkpoint is a dict"):
        read_file(path)


# ---------------------------------------------------------------------------------------- interruptions
def _failing(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_interrupted_write_leaves_the_old_file_and_nothing_else(path, tmp_path, monkeypatch, function, error):
    write_file(OLD, path)
    monkeypatch.setattr(os, function, _failing(error))

    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        write_file(NEW, path)

    assert os.listdir(tmp_path) == ["model.pth"]
    assert torch.equal(read_file(path)["weight"], OLD["weight"])
    if isinstance(error, OSError):
        assert f"cannot write '{path}': Input/output error" in str(caught.value)


@pytest.fixture
def file_size_limit():
    """A limit of the operating system on the size of a file: writing fails in the middle, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("num_tensors", [1, 100])
def test_a_write_that_fails_in_the_middle_leaves_the_old_file(path, tmp_path, file_size_limit, num_tensors):
    write_file(OLD, path)
    state = {str(index): torch.zeros(2_000_000 // num_tensors) for index in range(num_tensors)}

    with pytest.raises(CheckpointError, match="File too large"):
        write_file(state, path)

    assert os.listdir(tmp_path) == ["model.pth"]
    assert torch.equal(read_file(path)["weight"], OLD["weight"])


def test_killed_writers_leave_files_that_are_found_again(path, tmp_path, monkeypatch):
    with monkeypatch.context() as killed:  # a killed process renames and removes nothing
        killed.setattr(os, "replace", _failing(OSError(errno.EIO, "killed")))
        killed.setattr(os, "remove", _failing(OSError(errno.EIO, "killed")))
        with pytest.raises(CheckpointError):
            write_file(NEW, path)
    others = ["mine.tmp", ".hidden", ".model.pth.trainkit-tmp"]
    for name in others:
        (tmp_path / name).touch()
    assert len(os.listdir(tmp_path)) == 4

    remove_leftovers(tmp_path)

    assert sorted(os.listdir(tmp_path)) == sorted(others)


# ---------------------------------------------------------------------------------------- what may be saved
class _Custom:
    pass


class _Name(str):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.float64(0.5), "of type numpy.float64; "),
        (_Custom(), "_Custom; "),
        (_Name("a"), "_Name; "),
        ({1, 2}, "of type builtins.set; "),
        (b"", "of type builtins.bytes; "),
    ],
)
def test_other_than_plain_values_are_named_by_their_path(path, value, message):
    state = {"model": {}, "trainer": {"hooks": {"BestCheckpointer": {"best": value}}}}

    with pytest.raises(TypeError, match=rf"the state at 'trainer\.hooks\.BestCheckpointer\.best' is .*{message}"):
        write_file(state, path)
    assert not path.exists()


def test_path_shows_positions_and_keys_that_are_no_names(path):
    with pytest.raises(TypeError, match=r"'optimizer\.state\[3\]\.history\[1\]'"):
        write_file({"optimizer": {"state": {3: {"history": [0, _Custom()]}}}}, path)
    with pytest.raises(TypeError, match=r"the state at 'a\[frozenset"):
        write_file({"a": {frozenset(): 0}}, path)


def test_the_state_of_a_multi_step_schedule_can_be_saved(path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    state = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5]).state_dict()
    write_file({"scheduler": state}, path)
    assert read_file(path)["scheduler"]["milestones"] == collections.Counter({5: 2, 3: 1})
