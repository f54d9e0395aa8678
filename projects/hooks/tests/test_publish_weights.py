import hashlib
import os

import pytest
import torch
from trainkit.projects.hooks.publish_weights import publish_weights

from tests.checkpoint.conftest import Counter, linear
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.file import read_file, write_file


def save(folder, fill=1.0, **state):
    """A checkpoint with a trainer whose state is ``state``."""
    Checkpointer(linear(fill), folder, trainer=Counter(state)).save("model_final", iteration=9)
    return folder / "model_final.pth"


def names(folder):
    return sorted(os.listdir(folder))


def test_the_weights_alone_are_published_under_the_digest_of_the_file(tmp_path):
    path = save(tmp_path)

    published = publish_weights(path)

    with open(published, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    assert published == str(tmp_path / f"model_final_published-{digest[:8]}.pth")
    assert names(tmp_path) == ["last_checkpoint", "model_final.pth", os.path.basename(published)]
    assert sorted(read_file(path)) == ["iteration", "model", "trainer"]
    state = read_file(published)
    assert list(state) == ["model"]
    assert {key: value.unique().tolist() for key, value in state["model"].items()} == {"weight": [1.0], "bias": [1.0]}


def test_an_older_published_file_of_the_same_checkpoint_is_replaced(tmp_path):
    others = ["model_best_published-00000000.pth", "model_final_published_copy.pth", "other_model_final.pth"]
    for name in others:
        (tmp_path / name).touch()
    first = publish_weights(save(tmp_path, fill=1.0))
    assert publish_weights(tmp_path / "model_final.pth") == first
    assert os.path.exists(first)

    second = publish_weights(save(tmp_path, fill=2.0))

    assert first != second
    expected = ["last_checkpoint", "model_final.pth", os.path.basename(second), *others]
    assert names(tmp_path) == sorted(expected)


def test_averaged_weights_are_published_over_those_of_the_model(tmp_path):
    averaged = {"weight": torch.full((2, 2), 7.0)}
    write_file(
        {"model": linear(1).state_dict(), "trainer": {"hooks": {"EMAHook": {"model": averaged, "steps": 3}}}},
        tmp_path / "model_final.pth",
    )

    state = read_file(publish_weights(tmp_path / "model_final.pth", "ema"))

    assert list(state) == ["model"]
    assert {key: value.unique().tolist() for key, value in state["model"].items()} == {"weight": [7.0], "bias": [1.0]}


@pytest.mark.parametrize("trainer", [None, {"hooks": {}}, {"hooks": {"EMAHook": {"steps": 3}}}])
def test_averaged_weights_that_are_not_there_are_an_error(tmp_path, trainer):
    write_file({"model": linear(1).state_dict(), "trainer": trainer}, tmp_path / "model_final.pth")

    with pytest.raises(CheckpointError, match=r"no weights 'ema' to publish"):
        publish_weights(tmp_path / "model_final.pth", "ema")

    assert names(tmp_path) == ["model_final.pth"]


# ---------------------------------------------------------------------- safetensors


def tied():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model[1].bias.data = torch.arange(4.0)[::2]  # not contiguous
    return model


def test_safetensors_hold_every_tensor_by_its_name_and_the_package_reads_them(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = tied()
    Checkpointer(model, tmp_path).save("model_final")
    other = publish_weights(tmp_path / "model_final.pth")

    published = publish_weights(tmp_path / "model_final.pth", format="safetensors")

    digest = hashlib.sha256((tmp_path / published).read_bytes()).hexdigest()
    assert published == str(tmp_path / f"model_final_published-{digest[:8]}.safetensors")
    assert not os.path.exists(other)  # an older one of the same checkpoint
    read, own = safetensors.load_file(published), model.state_dict()
    assert [*sorted(read)] == [*sorted(own)]
    assert all(torch.equal(read[name], own[name]) and read[name].dtype == own[name].dtype for name in own)
