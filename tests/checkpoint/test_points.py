"""What stands in a checkpoint may look at the whole of it, and change it, before it is written and when it is read."""

import pytest
import torch

from tests.checkpoint.conftest import Counter, linear, weight_of
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.file import read_file


class Observer(Counter):
    """Notes the names in each state, and does something to it."""

    def __init__(self, value=0, edit=lambda state: None):
        super().__init__(value)
        self.calls, self.edit = [], edit

    def before_save(self, state):
        self.calls.append(("before_save", sorted(state)))
        self.edit(state)

    def after_load(self, state):
        self.calls.append(("after_load", sorted(state), self.value))
        self.edit(state)


# ---------------------------------------------------------------------------------------- saving
def test_the_whole_state_is_shown_once_before_it_is_written(tmp_path):
    observer = Observer(3)
    checkpointer = Checkpointer(linear(1), tmp_path, trainer=observer, other=Counter(4))

    checkpointer.save("model_0000009", iteration=9)
    checkpointer.save("model_best", tag_last=False)

    assert observer.calls == [
        ("before_save", ["iteration", "model", "other", "trainer"]),
        ("before_save", ["model", "other", "trainer"]),
    ]


def test_what_is_changed_before_the_save_is_written_so_and_the_model_keeps_its_weights(tmp_path):
    def edit(state):
        state["model"] = {name: value + 1 for name, value in state["model"].items()}
        state["note"] = "one more"
        del state["other"]

    model = linear(1)
    Checkpointer(model, tmp_path, trainer=Observer(3, edit), other=Counter(4)).save("model", iteration=9)

    written = read_file(str(tmp_path / "model.pth"))
    assert sorted(written) == ["iteration", "model", "note", "trainer"]
    assert torch.equal(written["model"]["weight"], torch.full((2, 2), 2.0))
    assert (written["note"], written["iteration"], written["trainer"]) == ("one more", 9, {"value": 3})
    assert weight_of(model) == 1


def test_several_see_what_those_before_them_have_changed(tmp_path):
    first, second = Observer(edit=lambda state: state.update(note=1)), Observer()
    Checkpointer(linear(1), tmp_path, first=first, second=second).save("model")

    assert first.calls == [("before_save", ["first", "model", "second"])]
    assert second.calls == [("before_save", ["first", "model", "note", "second"])]


def test_a_process_that_writes_nothing_is_shown_the_state_too(tmp_path):
    observer = Observer()
    Checkpointer(linear(1), tmp_path, save_to_disk=False, trainer=observer).save("model")

    assert observer.calls == [("before_save", ["model", "trainer"])]
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_is_saved_nothing_is_shown():
    observer = Observer()
    Checkpointer(linear(1), "", trainer=observer).save("model")

    assert observer.calls == []


# ---------------------------------------------------------------------------------------- loading
@pytest.fixture
def files(run_folder):
    """A folder to resume from and two files to start from, whose weights are 29, 29 and 5."""
    torch.save(linear(5).state_dict(), run_folder / "bare.pth")
    return run_folder


WAYS = {
    "resume": (lambda c, folder: c.resume_or_load("", resume=True), ["iteration", "model", "trainer"], 29, 29),
    "weights": (
        lambda c, folder: c.resume_or_load(folder / "model_0000019.pth", resume=False),
        ["iteration", "model", "trainer"],
        19,
        0,  # the trainer stays as it is
    ),
    "load": (lambda c, folder: c.load(folder / "model_0000009.pth"), ["iteration", "model", "trainer"], 9, 9),
    "load the model": (
        lambda c, folder: c.load(folder / "model_0000009.pth", checkpointables=[]),
        ["iteration", "model", "trainer"],
        9,
        0,
    ),
    "bare": (lambda c, folder: c.load(folder / "bare.pth"), ["model"], 5, 0),
    "bare weights": (lambda c, folder: c.resume_or_load(folder / "bare.pth", resume=False), ["model"], 5, 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_was_read_is_shown_once_on_every_path_before_anybody_takes_his_part(files, way):
    load, names, weight, value = WAYS[way]
    model, observer = linear(0), Observer(0)

    load(Checkpointer(model, files, trainer=observer), files)

    assert observer.calls == [("after_load", names, 0)]
    assert (weight_of(model), observer.value) == (weight, value)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_changed_in_what_was_read_is_loaded(files, way):
    def edit(state):
        assert weight_of(model) == 0  # nothing is loaded yet
        state["model"] = {name: value + 100 for name, value in state["model"].items()}
        state["note"] = "read"
        if "trainer" in state:
            state["trainer"]["value"] += 200

    load, _, weight, value = WAYS[way]
    model, observer = linear(0), Observer(0, edit)

    rest = load(Checkpointer(model, files, trainer=observer), files)

    assert weight_of(model) == weight + 100
    assert observer.value == (value + 200 if value else 0)
    assert rest["note"] == "read"  # what nobody takes is returned


def test_what_is_left_out_of_what_was_read_is_missed(files):
    observer = Observer(0, edit=lambda state: state.pop("trainer"))

    with pytest.raises(CheckpointError, match="no state for .*'trainer'"):
        Checkpointer(linear(0), files, trainer=observer).resume_or_load("", resume=True)


def test_several_see_what_those_before_them_have_changed_in_what_was_read(files):
    first, second = Observer(edit=lambda state: state.update(note=1)), Observer()
    Checkpointer(linear(0), files, trainer=first, second=second).load(files / "model_0000009.pth")

    assert first.calls == [("after_load", ["iteration", "model", "trainer"], 0)]
    assert second.calls == [("after_load", ["iteration", "model", "note", "trainer"], 0)]


@pytest.mark.parametrize("path", [None, ""])
def test_where_nothing_is_loaded_nothing_is_shown(tmp_path, path):
    observer = Observer()
    checkpointer = Checkpointer(linear(0), tmp_path, trainer=observer)
    checkpointer.load(path)
    checkpointer.resume_or_load(path, resume=True)

    assert observer.calls == []


def test_of_a_damaged_checkpoint_and_the_intact_one_before_it_only_the_latter_is_shown(files, caplog):
    newest = files / "model_0000029.pth"
    newest.write_bytes(newest.read_bytes()[:-100])
    model, observer = linear(0), Observer()

    Checkpointer(model, files, trainer=observer).resume_or_load("", resume=True)

    assert observer.calls == [("after_load", ["iteration", "model", "trainer"], 0)]
    assert (weight_of(model), observer.value) == (19, 19)
    assert "model_0000029.pth" in caplog.text


def test_the_points_are_no_part_of_what_an_object_must_have(files):
    counter = Counter(0)
    Checkpointer(linear(0), files, trainer=counter).load(files / "model_0000009.pth")

    assert counter.value == 9
