import logging
import os

import fvcore.common.checkpoint
import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoint.conftest import Counter, linear, weight_of
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.checkpoint.format import CheckpointFormat


def resume(folder, path="", **checkpointables):
    """Resume into a model of zeros; return its weight and the entries that nobody took."""
    model = linear(0)
    rest = Checkpointer(model, folder, **checkpointables).resume_or_load(path, resume=True)
    return weight_of(model), rest


def test_save_writes_the_files_of_fvcore_and_best_saves_do_not_move_the_tag(tmp_path, plug_in):
    plug_in("parts", "FORMATS = ['parts']")
    checkpointer = Checkpointer(linear(1), tmp_path / "new", trainer=Counter(1))
    checkpointer.save("model_0000009", iteration=9)
    checkpointer.save("model_best", tag_last=False)

    assert sorted(os.listdir(tmp_path / "new")) == [
        "last_checkpoint",
        "model_0000009.pth",
        "model_best.pth",
        "run_id",
    ]
    assert (tmp_path / "new" / "last_checkpoint").read_text() == "model_0000009.pth"
    assert checkpointer.get_checkpoint_file() == str(tmp_path / "new" / "model_0000009.pth")
    theirs, trainer = linear(0), Counter()
    rest = fvcore.common.checkpoint.Checkpointer(
        theirs, str(tmp_path / "new"), trainer=trainer
    ).resume_or_load("")
    assert weight_of(theirs) == 1
    assert trainer.value == 1
    assert rest["iteration"] == 9
    every_rank_writes = CheckpointFormat()
    every_rank_writes.collective = True
    Checkpointer(linear(1), tmp_path / "other", format=every_rank_writes).save("model")
    assert sorted(os.listdir(tmp_path / "other")) == ["last_checkpoint", "model.pth", "run_id"]
    # a file that is not there is no error, and a removal that was killed is completed
    for _ in range(2):
        (tmp_path / "new/model_best.parts-0123abcd").mkdir()
        checkpointer.remove("model_best")
    left = sorted(os.listdir(tmp_path / "new"))
    assert left == ["last_checkpoint", "model_0000009.pth", "run_id"]


def test_a_state_that_no_file_can_hold_is_named_and_left_out_and_the_weights_are_written(
    tmp_path, caplog
):
    checkpointer = Checkpointer(
        linear(1), tmp_path, trainer=Counter({"hooks": {"Best": np.float64(0.5)}}), other=Counter(7)
    )
    assert "'trainer.value.hooks.Best'" in checkpointer.describe_unwritable()
    assert os.listdir(tmp_path) == []
    with pytest.raises(TypeError, match=r"'trainer\.value\.hooks\.Best' is .*without this state"):
        checkpointer.save("model")
    saved = torch.load(tmp_path / "model.pth", weights_only=True)
    assert saved["left_out"] == ["trainer.value.hooks.Best"]
    assert saved.keys() == {"model", "other", "left_out", "run_id"}
    trainer = Counter(3)
    other = Counter(0)
    model = linear(0)
    resumed = Checkpointer(model, tmp_path, trainer=trainer, other=other)
    assert resumed.resume_or_load("") == {}
    assert weight_of(model) == 1
    assert trainer.value == 3
    assert other.value == 7
    assert "without these states" in caplog.text
    assert "trainer.value.hooks.Best" in caplog.text


def test_a_wrong_name_of_a_file_is_named_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="name must be .* got 'a/b'"):
        Checkpointer(linear(1), tmp_path).save("a/b")
    assert os.listdir(tmp_path) == []


def test_resume_takes_the_last_checkpoint_with_everything(run_folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    trainer = Counter()
    assert resume(run_folder, trainer=trainer) == (29, {"iteration": 29})
    assert trainer.value == 29

    trainer = Counter()  # a fresh folder: the model only
    assert resume(tmp_path / "fresh", run_folder / "model_0000009.pth", trainer=trainer)[0] == 9
    assert trainer.value == 0
    assert f"No checkpoint to resume from in '{tmp_path / 'fresh'}'" in caplog.text
    for folder in ("", tmp_path / "fresh"):
        assert not Checkpointer(linear(0), folder).has_checkpoint()
        assert resume(folder) == (0, {})

    model = linear(0)
    Checkpointer(model, run_folder, trainer=trainer).resume_or_load(
        run_folder / "model_0000019.pth", resume=False
    )
    assert weight_of(model) == 19
    assert trainer.value == 0


def test_a_folder_of_fvcore_can_be_resumed_but_not_weights_alone(tmp_path):
    fvcore.common.checkpoint.Checkpointer(linear(5), str(tmp_path), trainer=Counter(5)).save(
        "model", iteration=5
    )
    assert resume(tmp_path, trainer=Counter()) == (5, {"iteration": 5})
    Checkpointer(linear(1), tmp_path / "weights").save("model")
    with pytest.raises(CheckpointError, match=r"no state for \['trainer'\].* --resume"):
        resume(tmp_path / "weights", trainer=Counter())
    trainer = Counter()  # and the model has to be the same
    with pytest.raises(
        CheckpointError,
        match=r"entry 'model' does not fit(.|\n)*Missing.*0.weight(.|\n)*Unexpected",
    ):
        Checkpointer(nn.Sequential(linear(0)), tmp_path, trainer=trainer).resume_or_load("")
    assert trainer.value == 0


def test_what_does_not_fit_is_named_and_the_rest_is_loaded(tmp_path, caplog):
    torch.save(
        {"weight": torch.ones(2, 2), "bias": torch.ones(3), "extra": torch.ones(1)},
        tmp_path / "other.pth",
    )
    model = linear(0)
    model.register_buffer("steps", torch.zeros(4, 5))
    Checkpointer(model).load(tmp_path / "other.pth")
    assert weight_of(model) == 1
    assert model.bias.tolist() == [0, 0]
    shapes, missing, unexpected = (
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    )
    assert "'bias'" in shapes
    assert "steps" in missing
    assert "extra" in unexpected


@pytest.mark.parametrize(
    ("model", "weights", "strict", "message"),
    [
        (
            linear(0),
            {"weight": torch.ones(7, 7), "head": torch.ones(1)},
            False,
            "size mismatch for weight",
        ),
        (linear(0), {1: torch.ones(1)}, False, "AttributeError"),
        (linear(0), {"weight": torch.ones(2, 2)}, True, "Missing.*bias"),
        (nn.BatchNorm1d(2), {"other": torch.ones(1)}, False, "Unexpected"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error(tmp_path, model, weights, strict, message):
    torch.save({"model": weights}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=rf"entry 'model' does not fit(.|\n)*{message}"):
        Checkpointer(model).load(tmp_path / "other.pth", strict=strict)
    torch.save({"state_dict": weights, "loss": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(
        CheckpointError,
        match=r"entries \['state_dict', 'loss'\], no 'model'; save a file of the weights",
    ):
        Checkpointer(model).load(tmp_path / "other.pth", strict=strict)


def test_absent_checkpointables_are_warned_about_and_only_those_asked_for_are_loaded(
    tmp_path, caplog
):
    Checkpointer(linear(1), tmp_path, a=Counter(1), b=Counter(2)).save("model", iteration=3)
    a, b = Counter(), Counter()
    rest = Checkpointer(linear(0), a=a, b=b).load(tmp_path / "model.pth", checkpointables=["b"])
    assert a.value == 0
    assert b.value == 2
    assert rest == {"a": {"value": 1}, "iteration": 3}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    Checkpointer(linear(0), trainer=Counter(), a=a).load(tmp_path / "model.pth")
    assert "holds no state for ['trainer']" in caplog.text
    assert a.value == 1
    caplog.set_level(logging.INFO)
    # a start without weights is usual; a model that is only loaded is to be used as it is
    for folder, level in ((tmp_path / "new", logging.INFO), ("", logging.WARNING)):
        assert Checkpointer(linear(0), folder, a=a).load("") == {}
        record = caplog.records[-1]
        assert record.getMessage().startswith("No checkpoint to load")
        assert record.levelno == level


def test_data_parallel_wrapper_is_removed_on_both_sides(tmp_path):
    wrapped = nn.DataParallel(linear(1))
    Checkpointer(wrapped, tmp_path).save("ours")
    torch.save(wrapped.state_dict(), tmp_path / "theirs.pth")
    extra = {
        "get_extra_state": lambda self: {"steps": 1},
        "set_extra_state": lambda self, state: None,
    }
    # whose own keys start with "module.", and one has a dict
    own = type("Own", (nn.Module,), extra)()
    own.module = linear(1)
    torch.save(own.state_dict(), tmp_path / "own.pth")

    for name in ("ours", "theirs"):
        model = linear(0)
        Checkpointer(nn.DataParallel(model)).load(tmp_path / f"{name}.pth")
        assert weight_of(model) == 1
    own.module = linear(0)
    Checkpointer(own).load(tmp_path / "own.pth")
    assert weight_of(own.module) == 1


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
    assert written["note"] == "one more"
    assert written["iteration"] == 9
    assert written["trainer"] == {"value": 3}
    assert written["model"]["weight"].unique().tolist() == [2]
    assert weight_of(model) == 1
    assert first.calls == [("before_save", ["iteration", "model", "other", "trainer"])]
    assert second.calls == [("before_save", ["iteration", "model", "note", "trainer"])]

    # who does not write collects the state, who has no folder does not
    for folder, calls in ((tmp_path / "run", [("before_save", ["model", "trainer"])]), ("", [])):
        observer = Observer()
        Checkpointer(linear(1), folder, save_to_disk=False, trainer=observer).save("model")
        assert observer.calls == calls
    assert sorted(os.listdir(tmp_path)) == ["last_checkpoint", "model.pth", "run_id"]


@pytest.mark.parametrize(("resume", "weight", "value"), [(True, 129, 229), (False, 119, 0)])
def test_what_is_changed_in_what_was_read_is_loaded(run_folder, resume, weight, value):
    def edit(state):
        assert weight_of(model) == 0  # nothing is loaded yet
        state["model"] = {name: value + 100 for name, value in state["model"].items()}
        state["note"] = "read"
        state["trainer"]["value"] += 200

    model, observer = linear(0), Observer(0, edit)
    checkpointer = Checkpointer(model, run_folder, trainer=observer)
    rest = checkpointer.resume_or_load(run_folder / "model_0000019.pth", resume=resume)

    assert observer.calls == [("after_load", ["iteration", "model", "trainer"], 0)]
    assert weight_of(model) == weight
    assert observer.value == value
    assert rest["note"] == "read"  # what nobody takes is returned


def test_the_log_says_after_how_many_iterations_a_checkpoint_is_saved(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path)
    checkpointer.save("model_0000047", iteration=47)
    checkpointer.save("weights")
    first, second = [text for text in caplog.messages if text.startswith("Saving")]
    assert f"{tmp_path}/model_0000047.pth" in first
    assert first.endswith("after 48 iterations")
    assert second.endswith(f"{tmp_path}/weights.pth")


def test_a_folder_with_checkpoints_of_which_none_is_loaded_draws_a_warning(tmp_path, caplog):
    Checkpointer(linear(1), tmp_path).save("model", iteration=3)
    Checkpointer(linear(0), tmp_path).resume_or_load("", resume=False)
    [text] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"there are checkpoints in '{tmp_path}'" in text
    assert "--resume" in text
    caplog.clear()
    Checkpointer(linear(0), tmp_path).resume_or_load("")
    Checkpointer(linear(0), tmp_path / "other").resume_or_load("", resume=False)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
