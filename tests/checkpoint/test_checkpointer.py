import logging
import os
import sys

import fvcore.common.checkpoint
import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoint.conftest import Counter, linear, weight_of
from trainkit.checkpoint import Checkpointer, CheckpointError


def resume(folder, path="", **checkpointables):
    """Resume into a model of zeros; return its weight and the entries that nobody took."""
    model = linear(0)
    rest = Checkpointer(model, folder, **checkpointables).resume_or_load(path, resume=True)
    return weight_of(model), rest


# ---------------------------------------------------------------------------------------- saving
def test_save_writes_the_files_of_fvcore(tmp_path):
    Checkpointer(linear(1), tmp_path / "new").save("model_0000009")

    assert sorted(os.listdir(tmp_path / "new")) == ["last_checkpoint", "model_0000009.pth"]
    assert (tmp_path / "new" / "last_checkpoint").read_text() == "model_0000009.pth"


def test_best_save_does_not_move_last_checkpoint(run_folder):
    Checkpointer(linear(5), run_folder, trainer=Counter()).save("model_best", tag_last=False, iteration=5)
    assert resume(run_folder, trainer=Counter())[0] == 29


def test_numpy_scalar_in_a_state_is_named(tmp_path):
    checkpointer = Checkpointer(linear(1), tmp_path, trainer=Counter({"hooks": {"Best": np.float64(0.5)}}))
    with pytest.raises(TypeError, match=r"'trainer\.value\.hooks\.Best'"):
        checkpointer.save("model")
    assert os.listdir(tmp_path) == []


def test_wrong_arguments_are_named(tmp_path):
    checkpointer = Checkpointer(linear(1), tmp_path, trainer=Counter())
    with pytest.raises(ValueError, match="name must be .* got 'a/b'"):
        checkpointer.save("a/b")
    with pytest.raises(ValueError, match="an entry 'model' already"):
        checkpointer.add_checkpointable("model", Counter())
    with pytest.raises(TypeError, match=r"'lr' is a float without state_dict\(\)"):
        checkpointer.add_checkpointable("lr", 0.1)


# ---------------------------------------------------------------------------------------- resuming
def test_files_of_the_folder_are_found(run_folder, tmp_path):
    checkpointer = Checkpointer(linear(0), run_folder)

    assert checkpointer.get_checkpoint_file() == str(run_folder / "model_0000029.pth")
    assert checkpointer.get_all_checkpoint_files() == [
        str(run_folder / f"model_{iteration:07d}.pth") for iteration in (9, 19, 29)
    ]
    for folder in ("", tmp_path / "missing"):
        empty = Checkpointer(linear(0), folder)
        found = empty.has_checkpoint(), empty.get_checkpoint_file(), empty.get_all_checkpoint_files()
        assert found == (False, "", [])


def test_resume_takes_the_last_checkpoint_with_everything(run_folder):
    trainer = Counter()
    assert resume(run_folder, trainer=trainer) == (29, {"iteration": 29})
    assert trainer.value == 29


def test_a_fresh_folder_says_so_and_loads_the_model_only(tmp_path, run_folder, caplog):
    caplog.set_level(logging.INFO)
    trainer = Counter()
    weight, _ = resume(tmp_path / "fresh", str(run_folder / "model_0000009.pth"), trainer=trainer)

    assert (weight, trainer.value) == (9, 0)
    assert f"No checkpoint to resume from in '{tmp_path / 'fresh'}'" in caplog.text


def test_without_resume_the_model_alone_is_loaded(run_folder):
    model, trainer = linear(0), Counter()
    Checkpointer(model, run_folder, trainer=trainer).resume_or_load(run_folder / "model_0000009.pth", resume=False)
    assert (weight_of(model), trainer.value) == (9, 0)


def test_weights_only_file_cannot_be_resumed(tmp_path):
    Checkpointer(linear(1), tmp_path).save("model")
    model = linear(0)
    with pytest.raises(CheckpointError, match=r"no state for \['trainer'\].*set MODEL.WEIGHTS .* --resume"):
        Checkpointer(model, tmp_path, trainer=Counter()).resume_or_load("")
    assert weight_of(model) == 0


def test_resume_needs_exactly_the_model_of_the_checkpoint(run_folder):
    trainer = Counter()
    with pytest.raises(CheckpointError, match=r"another model(.|\n)*missing +0.weight(.|\n)*unexpected +weight"):
        Checkpointer(nn.Sequential(linear(0)), run_folder, trainer=trainer).resume_or_load("")
    assert trainer.value == 0


def test_a_buffer_that_the_model_creates_in_its_forward_pass_is_named_by_a_resume(tmp_path):
    model = linear(1)
    checkpointer = Checkpointer(model, tmp_path)
    model.register_buffer("mean", torch.zeros(2))
    checkpointer.save("model_0000000")
    with pytest.raises(CheckpointError, match=r"unexpected +mean(.|\n)*creates all its tensors in its constructor"):
        Checkpointer(linear(0), tmp_path).resume_or_load("")


# ---------------------------------------------------------------------------------------- loading
def test_differences_are_one_table_and_the_rest_is_loaded(tmp_path, caplog):
    torch.save({"weight": torch.ones(2, 2), "bias": torch.ones(3), "extra": torch.ones(1)}, tmp_path / "other.pth")
    model = linear(0)
    model.register_buffer("steps", torch.zeros(4, 5))

    Checkpointer(model).load(tmp_path / "other.pth")

    assert weight_of(model) == 1
    assert model.bias.tolist() == [0, 0]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.endswith(
        """do not fit the model and are not loaded:
            key    shape in the file    shape in the model
----------  -----  -------------------  --------------------
missing     steps  -                    [4, 5]
unexpected  extra  [1]                  -
mismatched  bias   [3]                  [2]"""
    )


@pytest.mark.parametrize(
    ("weights", "strict", "row"),
    [
        ({"weight": torch.ones(7, 7), "head": torch.ones(1)}, False, r"mismatched +weight +\[7, 7\] +\[2, 2\]"),
        ({1: torch.ones(1)}, False, r"unexpected +1 +\[1\]"),
        ({"weight": torch.ones(2, 2)}, True, r"missing +bias"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error(tmp_path, weights, strict, row):
    torch.save({"model": weights}, tmp_path / "other.pth")
    model = linear(0)
    with pytest.raises(CheckpointError, match=rf"another model(.|\n)*{row}"):
        Checkpointer(model).load(tmp_path / "other.pth", strict=strict)
    assert weight_of(model) == 0


def test_absent_checkpointable_is_warned_about_by_name(tmp_path, caplog):
    Checkpointer(linear(1), tmp_path).save("model")
    checkpointer = Checkpointer(linear(0), trainer=Counter(), ema=Counter())

    checkpointer.load(tmp_path / "model.pth")
    assert "holds no state for ['trainer', 'ema']" in caplog.text

    caplog.clear()
    checkpointer.load(tmp_path / "model.pth", checkpointables=[])
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_only_the_named_checkpointables_are_loaded(tmp_path):
    Checkpointer(linear(1), tmp_path, a=Counter(1), b=Counter(2)).save("model", iteration=3)
    a, b = Counter(), Counter()
    rest = Checkpointer(linear(0), a=a, b=b).load(tmp_path / "model.pth", checkpointables=["b"])
    assert (a.value, b.value, rest) == (0, 2, {"a": {"value": 1}, "iteration": 3})


@pytest.mark.parametrize("path", ["", None])
def test_no_path_loads_nothing_and_says_so(path, caplog):
    caplog.set_level(logging.INFO)
    assert Checkpointer(linear(0)).load(path) == {}
    assert "No checkpoint to load" in caplog.text


def test_data_parallel_wrapper_is_removed_on_both_sides(tmp_path):
    wrapped = nn.DataParallel(linear(1))
    Checkpointer(wrapped, tmp_path).save("ours")
    torch.save(wrapped.state_dict(), tmp_path / "theirs.pth")

    for name in ("ours", "theirs"):
        model = linear(0)
        Checkpointer(nn.DataParallel(model)).load(tmp_path / f"{name}.pth", strict=True)
        assert weight_of(model) == 1


def test_model_whose_own_keys_start_with_module_is_left_alone(tmp_path):
    model = nn.Module()
    model.module = linear(1)
    Checkpointer(model, tmp_path).save("model")
    model.module = linear(0)
    Checkpointer(model).load(tmp_path / "model.pth", strict=True)
    assert weight_of(model.module) == 1


# ---------------------------------------------------------------------------------------- fvcore
def test_fvcore_reads_our_file(run_folder):
    model, trainer = linear(0), Counter()
    rest = fvcore.common.checkpoint.Checkpointer(model, str(run_folder), trainer=trainer).resume_or_load("")
    assert (weight_of(model), trainer.value, rest["iteration"]) == (29, 29, 29)


def test_fvcore_folder_can_be_resumed(tmp_path):
    fvcore.common.checkpoint.Checkpointer(linear(5), str(tmp_path), trainer=Counter(5)).save("model", iteration=5)
    assert resume(tmp_path, trainer=Counter()) == (5, {"iteration": 5})


# ---------------------------------------------------------------------------------------- hooks of a save and a load
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


def test_what_is_changed_before_the_save_is_written_and_the_model_keeps_its_weights(tmp_path):
    def edit(state):
        state["model"] = {name: value + 1 for name, value in state["model"].items()}
        state["note"] = "one more"
        del state["other"]

    model, first, second = linear(1), Observer(3, edit), Observer(4)
    Checkpointer(model, tmp_path, trainer=first, other=second).save("model", iteration=9)

    written = torch.load(tmp_path / "model.pth", weights_only=True)
    assert (written["note"], written["iteration"], written["trainer"]) == ("one more", 9, {"value": 3})
    assert written["model"]["weight"].unique().tolist() == [2]
    assert weight_of(model) == 1
    assert first.calls == [("before_save", ["iteration", "model", "other", "trainer"])]
    assert second.calls == [("before_save", ["iteration", "model", "note", "trainer"])]


@pytest.mark.parametrize("folder", ["run", ""])
def test_who_does_not_write_collects_the_state_and_who_has_no_folder_does_not(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    observer = Observer()
    Checkpointer(linear(1), folder, save_to_disk=False, trainer=observer).save("model")
    assert observer.calls == ([("before_save", ["model", "trainer"])] if folder else [])
    assert list(tmp_path.iterdir()) == []


WAYS = {
    "resume": (lambda c, folder: c.resume_or_load("", resume=True), ["iteration", "model", "trainer"], 29, 29),
    "weights": (
        lambda c, folder: c.resume_or_load(folder / "model_0000019.pth", resume=False),
        ["iteration", "model", "trainer"],
        19,
        0,  # the trainer stays as it is
    ),
    "load": (lambda c, folder: c.load(folder / "model_0000009.pth"), ["iteration", "model", "trainer"], 9, 9),
    "bare": (lambda c, folder: c.load(folder / "bare.pth"), ["model"], 5, 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_changed_in_what_was_read_is_loaded(run_folder, way):
    def edit(state):
        assert weight_of(model) == 0  # nothing is loaded yet
        state["model"] = {name: value + 100 for name, value in state["model"].items()}
        state["note"] = "read"
        if "trainer" in state:
            state["trainer"]["value"] += 200

    torch.save(linear(5).state_dict(), run_folder / "bare.pth")
    load, names, weight, value = WAYS[way]
    model, observer = linear(0), Observer(0, edit)
    rest = load(Checkpointer(model, run_folder, trainer=observer), run_folder)

    assert observer.calls == [("after_load", names, 0)]
    assert (weight_of(model), observer.value) == (weight + 100, value + 200 if value else 0)
    assert rest["note"] == "read"  # what nobody takes is returned


def test_what_is_left_out_of_what_was_read_is_missed(run_folder):
    observer = Observer(0, edit=lambda state: state.pop("trainer"))
    with pytest.raises(CheckpointError, match="no state for .*'trainer'"):
        Checkpointer(linear(0), run_folder, trainer=observer).resume_or_load("", resume=True)


# ---------------------------------------------------------------------------------------- the end of a run
def test_the_mark_of_the_end_is_there_until_it_is_forgotten(tmp_path):
    checkpointer = Checkpointer(linear(1), tmp_path / "run")
    assert checkpointer.finished() is None
    checkpointer.forget_finished()
    checkpointer.mark_finished({"iterations": 5, "results": {"a/b": 0.5}})
    assert Checkpointer(linear(0), tmp_path / "run").finished() == {"iterations": 5, "results": {"a/b": 0.5}}
    checkpointer.forget_finished()
    assert checkpointer.finished() is None
    assert os.listdir(tmp_path / "run") == []


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff\xfe", b'{"iterations": 5'])
def test_a_damaged_mark_counts_as_none(tmp_path, content):
    (tmp_path / "finished").write_bytes(content)
    assert Checkpointer(linear(1), tmp_path).finished() is None


# ---------------------------------------------------------------------------------------- the price of a save
def calls_of(action):
    """The number of calls of Python functions."""
    num = 0

    def count(frame, event, argument):
        nonlocal num
        num += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return num


def test_a_save_makes_two_calls_per_tensor_more_than_torch(tmp_path):
    """One for the state dicts and one for the check, beside a fixed number."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    checkpointer = Checkpointer(model, tmp_path, optimizer=optimizer)
    checkpointer.save("model")
    state = torch.load(tmp_path / "model.pth", weights_only=True)
    num_tensors = 4 * 100
    more = calls_of(lambda: checkpointer.save("model")) - calls_of(lambda: torch.save(state, tmp_path / "plain.pth"))
    assert more <= 2 * num_tensors + 150
