"""A file from elsewhere runs no code and leads nowhere."""

import os

import pytest
import torch

from tests.checkpoint.conftest import Counter, linear, weight_of
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.file import write_file
from trainkit.engine import TrainerBase


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


WAYS = {
    "load": lambda c, path: c.load(path),
    "weights": lambda c, path: c.resume_or_load(path, resume=False),
    "resume": lambda c, path: c.resume_or_load("", resume=True),
}
STATES = {
    "top": lambda hidden: {"model": hidden},
    "optimizer": lambda hidden: {
        "model": linear(5).state_dict(),
        "trainer": {"state": {0: {"momentum": hidden}}},
    },
    "key": lambda hidden: {
        "model": linear(5).state_dict(),
        "trainer": {"value": 5},
        "list": [({1: hidden},)],
    },
}


@pytest.mark.parametrize(("state", "way"), [*zip(STATES, WAYS, strict=True)])
def test_a_pickle_that_runs_code_is_refused_and_runs_nothing(tmp_path, state, way):
    marker, path = tmp_path / "marker", tmp_path / "run" / "model.pth"
    path.parent.mkdir()
    torch.save(STATES[state](Evil(marker)), path)
    (path.parent / "last_checkpoint").write_text("model.pth")
    model, trainer = linear(0), Counter()

    with pytest.raises(
        CheckpointError, match=r"model\.pth' is refused: it needs \S*system.*Only tensors and plain"
    ):
        WAYS[way](Checkpointer(model, path.parent, trainer=trainer), path)
    assert weight_of(model) == 0
    assert trainer.value == 0
    assert not marker.exists()

    torch.load(path, weights_only=False)
    assert marker.exists()


@pytest.fixture
def outside(tmp_path):
    """A folder with a checkpoint, beside another checkpoint, and with links to both."""
    Checkpointer(linear(99), tmp_path, trainer=Counter(99)).save("outside", tag_last=False)
    run = tmp_path / "run"
    Checkpointer(linear(1), run, trainer=Counter(1)).save("model")
    (run / "link.pth").symlink_to(tmp_path / "outside.pth")
    (run / "inner.pth").symlink_to("model.pth")
    (run / "below").symlink_to(tmp_path)
    return run


@pytest.mark.parametrize(
    "name", ["../outside.pth", "{parent}/outside.pth", "link.pth", "below", "..", "\x1b[31m"]
)
def test_a_tag_that_leads_out_of_the_folder_or_is_no_name_is_refused(outside, name):
    (outside / "last_checkpoint").write_bytes(name.format(parent=outside.parent).encode())
    model, trainer = linear(0), Counter()
    checkpointer = Checkpointer(model, outside, trainer=trainer)

    for find in (checkpointer.has_checkpoint, lambda: checkpointer.resume_or_load("")):
        with pytest.raises(
            CheckpointError, match="it has to hold the bare name of a file in its folder"
        ) as caught:
            find()
        assert str(caught.value).isprintable()
    assert weight_of(model) == 0
    assert trainer.value == 0


def test_a_tag_that_stays_in_the_folder_is_followed_and_one_that_is_a_link_out_of_it_is_not_shown(
    outside, tmp_path
):
    (tmp_path / "link").symlink_to(outside)
    for name in ("model.pth", " model.pth\n", "inner.pth"):
        (outside / "last_checkpoint").write_text(name)
        model = linear(0)
        Checkpointer(model, tmp_path / "link", trainer=Counter()).resume_or_load("")
        assert weight_of(model) == 1

    (tmp_path / "secret").write_text("hunter2")
    (outside / "last_checkpoint").unlink()
    (outside / "last_checkpoint").symlink_to(tmp_path / "secret")
    with pytest.raises(
        CheckpointError, match=r"last_checkpoint' is a link out of its folder"
    ) as caught:
        Checkpointer(linear(0), outside, trainer=Counter()).resume_or_load("")
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize("trainer", [3, {}, {"iteration": 1, "boundary": 3}])
def test_a_trainer_of_other_contents_is_one_message(trainer, tmp_path):
    write_file({"model": linear(1.0).state_dict(), "trainer": trainer}, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match="its entry .trainer. does not fit"):
        Checkpointer(linear(1.0), trainer=TrainerBase()).load(str(tmp_path / "model.pth"))
