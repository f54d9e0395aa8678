"""Checkpoints whose tensors are in a folder beside the file: they run no code, lead nowhere, and are read whole."""

import contextlib
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from trainkit.projects.hooks.publish_weights import publish_weights
from trainkit.projects.sharding.format import files_of

from tests.checkpoint.test_safety import Evil
from tests.tools.test_inspect_checkpoint import damage, inspect, rows
from tools.inspect_checkpoint import compare_files
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.file import write_file

__all__ = ["inspect"]

pytestmark = [  # of torch.distributed.checkpoint; the second one of torch 2.9
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def write_shards(folder, fill=5.0):
    """A checkpoint whose tensors are in ``folder``, as one of several processes has written them."""
    values = {
        "model.weight": torch.full((4,), fill),
        "model.scale": torch.ones(2, 3, dtype=torch.bfloat16),
    }
    dcp.save(values, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    path = folder.parent / f"{folder.name.partition('.')[0]}.pth"
    write_manifest(path, folder)
    return path, folder


def write_manifest(path, folder, changes=()):
    empty = {"weight": torch.empty(4, device="meta")}
    empty["scale"] = torch.empty(2, 3, device="meta", dtype=torch.bfloat16)
    write_file(
        {
            "iteration": 9,
            "model": empty,
            "shards": {"folder": folder.name, "files": files_of(folder), **dict(changes)},
        },
        path,
    )


@pytest.fixture
def sharded(tmp_path):
    return write_shards(tmp_path / "model.shards-01234567")


class Vector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.scale = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))


READERS = {
    "load": lambda path: Checkpointer(Vector(), path.parent).load(path, strict=True),
    "weights": lambda path: Checkpointer(Vector(), path.parent).resume_or_load(path, resume=False),
    "resume": lambda path: Checkpointer(Vector(), path.parent).resume_or_load("", resume=True),
    "publish": publish_weights,
    "compare": lambda path: compare_files(str(path), str(path)),
}


def in_metadata(folder, evil):
    (folder / ".metadata").write_bytes(pickle.dumps(evil))


def inside_metadata(folder, evil):
    """At a place that nobody reads."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    metadata.planner_data = {"model.weight": evil}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_an_item(folder, evil):
    """torch unpickles what is no tensor without limits."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    metadata.state_dict_metadata["model.weight"] = BytesStorageMetadata()
    place = metadata.storage_data.pop(MetadataIndex("model.weight", (0,)))
    metadata.storage_data[MetadataIndex("model.weight")] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    put_into_an_item(folder, evil)


def put_into_an_item(folder, evil):
    file = io.BytesIO()
    torch.save(evil, file)
    (file_of_rank_0,) = folder.glob("*.distcp")
    file_of_rank_0.write_bytes(file.getvalue().ljust(file_of_rank_0.stat().st_size, b"\0"))
    metadata = dcp.FileSystemReader(folder).read_metadata()
    del metadata.state_dict_metadata["model.scale"]
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(file.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("hide", [in_metadata, inside_metadata, in_an_item, put_into_an_item])
def test_shards_run_no_code(sharded, tmp_path, hide):
    path, folder = sharded
    marker = tmp_path / "marker"
    hide(folder, Evil(marker))
    marker.unlink(missing_ok=True)
    write_manifest(path, folder)
    (tmp_path / "last_checkpoint").write_text("model.pth")
    for read in READERS.values():
        with pytest.raises(CheckpointError, match=r"the shards of '\S+model\.pth'"):
            read(path)
    assert not marker.exists()


def test_the_payloads_of_the_test_would_run(sharded, tmp_path):
    _, folder = sharded
    for hide in (in_an_item, inside_metadata, in_metadata):
        hide(folder, Evil(tmp_path / "marker"))
        (tmp_path / "marker").unlink(missing_ok=True)
        with contextlib.suppress(BaseException):
            tensors = {"model.weight": torch.zeros(4)}
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        assert (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "name", ["../{}", "{parent}/outside/{}", "link.shards-01234567", "below/{}", ".."]
)
def test_shards_stand_beside_their_file(tmp_path, name):
    outside, run = tmp_path / "outside" / "model.shards-01234567", tmp_path / "run"
    outside.parent.mkdir()
    run.mkdir()
    write_shards(outside)
    there = outside.rename(tmp_path / outside.name) if name.startswith("../") else outside
    (run / "link.shards-01234567").symlink_to(there)
    (run / "below").symlink_to(outside.parent)
    write_manifest(run / "model.pth", there, {"folder": name.format(outside.name, parent=tmp_path)})
    for read in ("load", "weights", "publish", "compare"):
        with pytest.raises(
            CheckpointError, match=r"is refused: its shards .* have to be a folder beside it"
        ):
            READERS[read](run / "model.pth")


def test_files_of_shards_are_in_their_folder(sharded, tmp_path):
    path, folder = sharded
    (item,) = folder.glob("*.distcp")
    item.rename(tmp_path / item.name)
    for name in (f"../{item.name}", str(tmp_path / item.name), "link"):
        (folder / "link").unlink(missing_ok=True)
        (folder / "link").symlink_to(tmp_path / item.name)
        write_manifest(path, folder, {"files": {name: ((tmp_path / item.name).stat().st_size, "")}})
        with pytest.raises(CheckpointError, match="files in that folder, no links out of it"):
            READERS["load"](path)


def test_metadata_names_only_files_of_the_checkpoint(sharded, tmp_path):
    path, folder = sharded
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = "../other"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    write_manifest(path, folder)
    with pytest.raises(
        CheckpointError, match=r"is refused: it names '\.\./other'; accepted are \['"
    ):
        READERS["load"](path)


@pytest.mark.parametrize("shards", [3, {}, {"folder": 3, "files": 3}, {"folder": "a"}])
def test_an_entry_shards_that_names_no_folder_is_an_error(tmp_path, shards):
    write_file({"model": {"weight": torch.zeros(4)}, "shards": shards}, tmp_path / "model.pth")
    (tmp_path / "last_checkpoint").write_text("model.pth")
    for read in READERS.values():
        with pytest.raises(
            CheckpointError, match=r"model\.pth' is damaged: its entry 'shards' has to name"
        ):
            read(tmp_path / "model.pth")


def test_shards_belong_to_their_file(tmp_path, inspect):
    one, folder = write_shards(tmp_path / "one.shards-01234567", 1.0)
    other, folder_of_other = write_shards(tmp_path / "other.shards-01234567", 1.5)
    size = sum(path.stat().st_size for path in folder.iterdir())
    code, out, _ = inspect(one, "--all")
    assert code == 0
    assert f"one.shards-01234567, {size / 1024:.4g} KiB\n" in out
    assert rows(out)["weight"] == ["weight", "[4]", "float32", "16", "B"]
    difference, end = inspect(one, other)[1].splitlines()
    assert difference == "model/weight: 4 of 4 values, by at most 0.5"
    assert end == "different in 1 places"

    damage(next(folder_of_other.glob("*.distcp")))
    assert inspect(other)[0] == 2
    (one.parent / "last_checkpoint").write_text("other.pth")
    code, out, _ = inspect(one.parent)
    assert code == 1
    assert rows(out)["one.pth"][-1] == "intact"
    assert rows(out)["other.pth"][-1] == "BROKEN"
    assert out.endswith("\n--resume continues from one.pth.\n")
