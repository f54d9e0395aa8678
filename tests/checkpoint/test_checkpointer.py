import logging
import os

import fvcore.common.checkpoint
import numpy as np
import pytest
import torch
from torch import nn
from trainkit.projects.hooks.publish_weights import publish_weights

from tests.checkpoint.conftest import Counter, linear, weight_of
from trainkit.checkpoint import Checkpointer, CheckpointError


def damage(path):
    content = bytearray(path.read_bytes())
    content[content.find(b"weight")] ^= 1  # in the middle there is padding, where it does no harm
    path.write_bytes(content)


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


@pytest.mark.parametrize("failing", ["model_0000039.pth", "last_checkpoint"])
def test_failed_save_leaves_the_last_checkpoint_in_place(run_folder, monkeypatch, failing):
    replace = os.replace

    def fail(source, target):
        if os.path.basename(target) == failing:
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as full:
        full.setattr(os, "replace", fail)
        with pytest.raises(CheckpointError, match=failing):
            Checkpointer(linear(39), run_folder).save("model_0000039")

    assert [name for name in os.listdir(run_folder) if name.startswith(".")] == []
    assert (run_folder / "last_checkpoint").read_text() == "model_0000029.pth"
    assert resume(run_folder, trainer=Counter())[0] == 29


def test_next_save_removes_what_a_killed_one_left(run_folder):
    (run_folder / ".model_0000039.pth.0123abcd.trainkit-tmp").touch()

    Checkpointer(linear(39), run_folder).save("model_0000039")

    assert [name for name in os.listdir(run_folder) if name.startswith(".")] == []


def test_numpy_scalar_in_a_state_is_named(tmp_path):
    checkpointer = Checkpointer(linear(1), tmp_path, trainer=Counter({"hooks": {"Best": np.float64(0.5)}}))

    with pytest.raises(TypeError, match=r"'trainer\.value\.hooks\.Best'"):
        checkpointer.save("model")
    assert os.listdir(tmp_path) == []


def test_process_that_does_not_save_to_disk_collects_the_state_only(tmp_path):
    calls = []

    class Spy(Counter):
        def state_dict(self):
            calls.append("state_dict")
            return {}

    Checkpointer(linear(1), tmp_path, save_to_disk=False, spy=Spy()).save("model")

    assert calls == ["state_dict"]
    assert os.listdir(tmp_path) == []


def test_wrong_arguments_are_named(tmp_path):
    checkpointer = Checkpointer(linear(1), tmp_path, trainer=Counter())

    with pytest.raises(ValueError, match="got 'a/b'; the folder is save_dir"):
        checkpointer.save("a/b")
    with pytest.raises(ValueError, match=r"entries \['trainer'\], which the checkpoint has already"):
        checkpointer.save("model", trainer=1)
    with pytest.raises(ValueError, match="an entry 'model' already"):
        checkpointer.add_checkpointable("model", Counter())
    with pytest.raises(TypeError, match=r"'lr' of type float has no method state_dict\(\)"):
        checkpointer.add_checkpointable("lr", 0.1)
    with pytest.raises(ValueError, match=r"checkpointables has \['sched'\], which were not added"):
        checkpointer.load("", checkpointables=["sched"])


# ---------------------------------------------------------------------------------------- resuming
def test_files_of_the_folder_are_found(run_folder, tmp_path):
    checkpointer = Checkpointer(linear(0), run_folder)

    assert checkpointer.get_checkpoint_file() == str(run_folder / "model_0000029.pth")
    assert checkpointer.get_all_checkpoint_files() == [
        str(run_folder / f"model_{iteration:07d}.pth") for iteration in (9, 19, 29)
    ]
    for folder in ("", tmp_path / "missing"):
        empty = Checkpointer(linear(0), folder)
        assert (empty.has_checkpoint(), empty.get_checkpoint_file(), empty.get_all_checkpoint_files()) == (
            False,
            "",
            [],
        )


def test_resume_takes_the_last_checkpoint_with_everything(run_folder):
    trainer = Counter()

    weight, rest = resume(run_folder, trainer=trainer)

    assert (weight, trainer.value, rest) == (29, 29, {"iteration": 29})


def test_broken_checkpoint_falls_back_to_the_newest_intact_one(run_folder, caplog):
    damage(run_folder / "model_0000029.pth")
    trainer = Counter()

    weight, _ = resume(run_folder, trainer=trainer)

    assert (weight, trainer.value) == (19, 19)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "model_0000029.pth' is damaged" in warning
    assert f"Resuming from '{run_folder / 'model_0000019.pth'}' instead" in warning


def test_missing_checkpoint_falls_back_too(run_folder, caplog):
    (run_folder / "model_0000029.pth").unlink()

    assert resume(run_folder, trainer=Counter())[0] == 19
    assert "model_0000029.pth': no such file" in caplog.text


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_lost_last_checkpoint_file_is_replaced_by_the_newest(run_folder, content):
    if content is None:
        (run_folder / "last_checkpoint").unlink()
    else:
        (run_folder / "last_checkpoint").write_text(content)
    torch.save({"model": linear(99).state_dict()}, run_folder / "pretrained.pth")  # not ours, so no checkpoint

    assert Checkpointer(linear(0), run_folder).has_checkpoint()
    assert resume(run_folder, trainer=Counter())[0] == 29


def test_no_intact_checkpoint_is_an_error_that_lists_all(run_folder):
    for path in run_folder.glob("*.pth"):
        damage(path)
    trainer, model = Counter(), linear(0)

    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact: .*29.pth.*19.pth.*0009.pth"):
        Checkpointer(model, run_folder, trainer=trainer).resume_or_load("")
    assert (weight_of(model), trainer.value) == (0, 0)


@pytest.mark.parametrize("name", ["../model_0000029.pth", "/tmp/model.pth", "..", "sub/model.pth"])
def test_last_checkpoint_that_leads_elsewhere_is_refused(run_folder, name):
    (run_folder / "last_checkpoint").write_text(name)

    with pytest.raises(CheckpointError, match="has to hold the bare name of a file in its folder"):
        resume(run_folder, trainer=Counter())


def test_resume_without_checkpoint_says_so_and_loads_the_model_only(tmp_path, run_folder, caplog):
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

    with pytest.raises(CheckpointError, match=r"holds weights only.*\['trainer'\].*set MODEL.WEIGHTS .* --resume"):
        Checkpointer(model, tmp_path, trainer=Counter()).resume_or_load("")
    assert weight_of(model) == 0


def test_resume_needs_exactly_the_model_of_the_checkpoint(run_folder):
    model, trainer = nn.Sequential(linear(0)), Counter()

    with pytest.raises(CheckpointError, match=r"another model(.|\n)*missing +0.weight(.|\n)*unexpected +weight"):
        Checkpointer(model, run_folder, trainer=trainer).resume_or_load("")
    assert trainer.value == 0


def test_a_buffer_that_the_model_creates_in_its_forward_pass_is_named_by_a_resume(tmp_path):
    model = linear(1)
    checkpointer = Checkpointer(model, tmp_path)
    model.register_buffer("mean", torch.zeros(2))
    checkpointer.save("model_0000000")
    with pytest.raises(CheckpointError, match=r"unexpected +mean(.|\n)*create all its tensors in its constructor"):
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
        """do not fit the model:
            key    shape in the file    shape in the model
----------  -----  -------------------  --------------------
missing     steps  -                    [4, 5]
unexpected  extra  [1]                  -
mismatched  bias   [3]                  [2]
Missing and mismatched weights stay as they were; to load all, build the model of the file"""
    )


def test_file_of_which_nothing_fits_is_an_error(tmp_path):
    torch.save({"model": {"weight": torch.ones(7, 7), "head": torch.ones(1)}}, tmp_path / "other.pth")

    with pytest.raises(CheckpointError, match=r"another model(.|\n)*mismatched +weight +\[7, 7\] +\[2, 2\]") as caught:
        Checkpointer(linear(0)).load(tmp_path / "other.pth")
    remedy = "build the model of the file (MODEL in a config), or name another file"
    assert str(caught.value).splitlines()[-1] == remedy


def test_keys_that_are_no_names_fit_no_model(tmp_path):
    torch.save({1: torch.ones(1)}, tmp_path / "other.pth")

    with pytest.raises(CheckpointError, match=r"another model(.|\n)*unexpected +1 +\[1\]"):
        Checkpointer(linear(0)).load(tmp_path / "other.pth")


def test_strict_load_accepts_no_difference(tmp_path):
    model = linear(0)
    torch.save({"model": {"weight": torch.ones(2, 2)}}, tmp_path / "part.pth")

    with pytest.raises(CheckpointError, match=r"missing +bias"):
        Checkpointer(model).load(tmp_path / "part.pth", strict=True)
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


def test_model_whose_own_keys_begin_with_module_is_left_alone(tmp_path):
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


def test_a_tensor_of_another_sort_is_an_error(tmp_path):
    torch.save({"model": {"weight": torch.ones(2, 2).to_sparse(), "bias": torch.zeros(2)}}, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match=r"model\.pth' does not fit the model; name another file: "):
        Checkpointer(linear(0)).load(tmp_path / "model.pth")


def test_weights_with_keys_of_another_sort_are_not_published(tmp_path):
    torch.save({"model": {(1, 2): torch.ones(2)}}, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match=r"the weights of '\S+model\.pth' cannot be published: "):
        publish_weights(tmp_path / "model.pth")
