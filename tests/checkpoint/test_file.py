"""One file: what may be in it, what damages it, and writes that fail."""

import collections
import errno
import os
import random
from enum import IntEnum

import numpy as np
import pytest
import torch

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.file import read_file, write_file

OLD, NEW = {"weight": torch.zeros(3)}, {"weight": torch.ones(3)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pth"


def test_state_comes_back_with_values_and_types_and_torch_reads_it(path):
    tied = torch.zeros(100_000)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    state = {
        "tensors": [
            torch.arange(3),
            torch.ones(2, dtype=torch.bfloat16),
            torch.zeros(2).to_sparse(),
        ],
        "plain": ("a", b"b", 1, 2.5, 1 + 2j, True, None, float("inf"), IntEnum("Sort", ["A"]).A),
        "torch": [torch.Size([1, 2]), torch.float16, torch.device("cpu")],
        "keys": collections.OrderedDict(
            [("s", 1), (2, 2), (0.5, 3), (IntEnum("Sort", ["A"]).A, 4)]
        ),
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5]).state_dict(),
        "model": torch.nn.BatchNorm1d(2).state_dict(),
        "tied": [tied, tied],
        "parameter": torch.nn.Parameter(torch.ones(1)),
    }

    write_file(state, path)
    loaded = read_file(path)

    assert loaded.keys() == state.keys()
    assert [tensor.dtype for tensor in loaded["tensors"]] == [
        torch.int64,
        torch.bfloat16,
        torch.float32,
    ]
    assert loaded["tensors"][0].tolist() == [0, 1, 2]
    for key in ("plain", "torch", "keys"):
        assert loaded[key] == state[key]
    assert type(loaded["keys"]) is collections.OrderedDict
    assert type(loaded["plain"][-1]) is int
    assert loaded["scheduler"]["milestones"] == collections.Counter({5: 2, 3: 1})
    # a file without the version of batch norm would be taken for one of before this buffer
    del loaded["model"]["num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        torch.nn.BatchNorm1d(2).load_state_dict(loaded["model"])
    assert path.stat().st_size < 1.1 * 400_000  # tied weights are stored once
    assert torch.load(path, weights_only=True)["parameter"].item() == 1


class _Name(str):
    pass


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"a": {3: {"history": [0, np.float64(0.5)]}}},
            r"'a\[3\]\.history\[1\]' is .* of type numpy.float64; ",
        ),
        ({"a": [_Name("a")]}, r"'a\[0\]' is .*_Name; "),
        ({"a": b""}, "of type builtins.bytes; "),
        ({"a": {frozenset(): 0}}, r"'a\[frozenset"),
        (
            {"a": {"b": torch.nn.parameter.UninitializedParameter()}},
            "'a.b' is .*UninitializedParameter",
        ),
    ],
)
def test_other_than_plain_values_are_named_by_their_path(path, state, message):
    with pytest.raises(TypeError, match=rf"^the state at .*{message}"):
        write_file(state, path)
    assert not path.exists()


def test_no_flipped_byte_and_no_truncated_file_loads_as_something_else(path):
    """Some flips are harmless: a zip archive has padding, and fields that nobody reads."""
    weight = torch.randn(500, generator=torch.Generator().manual_seed(0))
    write_file({"weight": weight}, path)
    intact, rng, refused = path.read_bytes(), random.Random(0), 0
    for position in [*rng.sample(range(len(intact)), 200), *range(len(intact) - 60, len(intact))]:
        damaged = bytearray(intact)
        damaged[position] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            assert torch.equal(read_file(path)["weight"], weight)
        except CheckpointError:
            refused += 1
    assert refused > 170
    for length in [*range(0, len(intact), 40), *range(len(intact) - 30, len(intact))]:
        path.write_bytes(intact[:length])
        with pytest.raises(CheckpointError, match=r"model\.pth"):
            read_file(path)


def test_a_file_with_other_contents_is_refused_and_nothing_unsafe_recommended(path):
    with pytest.raises(CheckpointError, match="cannot read .*: No such file or directory$"):
        read_file(path)
    torch.save({"best": np.float64(1)}, path)
    with pytest.raises(CheckpointError, match=r"it needs numpy\S+scalar") as caught:
        read_file(path)
    assert "weights_only" not in str(caught.value)
    assert caught.value.__suppress_context__
    torch.save(torch.zeros(2), path)
    with pytest.raises(CheckpointError, match="holds a Tensor; a checkpoint is a dict"):
        read_file(path)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    path, tmp_path, monkeypatch, error
):
    def fail(*args):
        raise error

    write_file(OLD, path)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        write_file(NEW, path)

    assert os.listdir(tmp_path) == ["model.pth"]
    assert torch.equal(read_file(path)["weight"], OLD["weight"])
