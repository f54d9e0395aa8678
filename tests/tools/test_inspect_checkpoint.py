"""What a checkpoint is said to hold, whether it is said to be intact, and where two are said to differ."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from trainkit.projects.hooks.publish_weights import publish_weights

from tests.checkpoint.conftest import run_folder
from tests.engine.job import tiny_cfg
from tests.tools.command import call
from tools import inspect_checkpoint
from trainkit.checkpoint.file import read_file, write_file
from trainkit.engine import DefaultTrainer


@pytest.fixture
def inspect(capsys):
    """Run the command."""
    return partial(call, inspect_checkpoint, capsys)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with checkpoints of iterations 4 and 9, the best one of metric top1 and the final one."""
    folder = tmp_path_factory.mktemp("run")
    DefaultTrainer(tiny_cfg(folder, "CHECKPOINT.BEST_METRIC", "classification/top1")).train()
    return folder


small = run_folder


def damage(path):
    content = bytearray(path.read_bytes())
    name = b"archive/data/0"
    begin = content.index(name) + len(name) + 64
    # of a tensor, which torch.save aligns; elsewhere there is padding
    content[begin - begin % 64] ^= 1
    path.write_bytes(content)


def rows(text):
    """The lines of a table by their first cell."""
    return {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}


def test_a_file_of_a_run_is_described(run, inspect):
    code, out, err = inspect(run / "model_0000004.pth", "--all")

    assert code == 0
    assert err == ""
    found = rows(out)
    assert found["intact"][1] == "yes,"
    assert "\niteration  after 5 iterations (number 4, " in out
    assert " ".join(found["model"]) == "model 368 B 9 tensors"  # the row of the entry
    assert re.search(r"^model +91 values in 9 tensors, 368 B$", out, re.MULTILINE)
    assert "\ncommand " in out
    assert found["layers.0.weight"] == ["layers.0.weight", "[8,", "4]", "float32", "128", "B"]
    assert {
        "trainer/boundary",
        "trainer/end",
        "trainer/rng",
        "trainer/storage",
        "trainer/hooks/LRScheduler",
    } <= found.keys()
    assert " ".join(found["trainer/hooks/EvalHook"]) == "trainer/hooks/EvalHook evaluated_iters -1"
    assert " ".join(found["trainer/data"]).startswith(
        "trainer/data kind TrainingSampler, seed 1, position 40, "
    )

    short = inspect(run / "model_0000004.pth")[1]
    assert set(short.splitlines()) < set(out.splitlines())
    assert "layers.0.weight" not in short


def test_a_best_file_says_of_which_metric_value_direction_and_weights_it_is(run, inspect, tmp_path):
    lines = (run / "metrics.json").read_text().splitlines()
    values = [json.loads(line).get("classification/top1", -1.0) for line in lines]
    best = f"best       classification/top1 {max(values)} (max)"

    assert best in inspect(run / "model_best.pth")[1].splitlines()
    assert "\nbest " not in inspect(run / "model_final.pth")[1]
    averaged = {**read_file(run / "model_best.pth"), "evaluated": "ema"}
    write_file(averaged, tmp_path / "averaged.pth")
    assert f"{best}, of the weights 'ema'" in inspect(tmp_path / "averaged.pth")[1].splitlines()


def test_files_of_other_programs_are_described_as_far_as_they_say_something(tmp_path, inspect):
    weights = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(3)}
    torch.save(weights, tmp_path / "bare.pth")
    others = {"optimizer": {"state": {}}, "scheduler": {"last_epoch": 3}, "iteration": 3}
    torch.save({"model": weights, **others}, tmp_path / "detectron2.pth")

    for name in ("bare.pth", "detectron2.pth"):
        code, out, _ = inspect(tmp_path / name, "--all")
        found = rows(out)
        assert code == 0
        assert found["intact"][1] == "yes,"
        assert found["a"] == ["a", "[2]", "bfloat16", "4", "B"]
        assert re.search(r"^model +5 values in 2 tensors, 16 B$", out, re.MULTILINE)
    assert "after 4 iterations (number 3, " in out
    assert found["scheduler"] == ["scheduler", "last_epoch", "3"]


class Opener:
    """What pickles to a call that creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_list_in_many_places_is_read_once_and_names_cannot_control_the_terminal(
    tmp_path, inspect
):
    shared = [torch.ones(2)]
    for _ in range(40):  # 2**40 ways lead to the tensor
        shared = [shared, shared]
    for name in ("a.pth", "b.pth"):
        model = {"evil\x1b[2J": torch.ones(1)}
        torch.save(
            {"model": model, "sparse": torch.eye(3).to_sparse(), "shared": shared}, tmp_path / name
        )
    code, out, _ = inspect(tmp_path / "a.pth", "--all")
    assert code == 0
    assert "evil\\x1b[2J" in out
    assert "\x1b" not in out
    assert inspect(tmp_path / "a.pth", tmp_path / "b.pth")[1].startswith("identical: 3 entries")


def test_a_file_that_cannot_be_read_is_one_line_and_code_2_and_no_code_of_it_is_run(small, inspect):
    damage(small / "model_0000029.pth")
    torch.save({"a": np.ones(2)}, small / "numpy.pth")
    torch.save(torch.ones(2), small / "tensor.pth")
    torch.save({"model": Opener(small / "created")}, small / "evil.pth")
    expected = {
        "evil.pth": "evil.pth' is refused: it needs ",
        "model_0000029.pth": "is damaged or not a file of torch.save: the content of its record 'archive/",
        "numpy.pth": "is refused: it needs numpy.",
        "tensor.pth": "holds a Tensor; a checkpoint is a dict",
        "modle_0000019.pth": "No such file",
        "last_checkpoint": "is not a checkpoint; name a file that torch.save wrote",
    }
    for name, text in expected.items():
        code, out, err = inspect(small / name)
        assert code == 2
        assert out == ""
        assert err.count("\n") == 1
        assert err[:7] == "error: "
        assert text in err
    assert not (small / "created").exists()
    torch.load(small / "evil.pth", weights_only=False)["model"].close()  # the control
    assert (small / "created").exists()


def test_a_folder_is_a_table_of_its_checkpoints_with_the_one_to_go_on_from(run, small, inspect):
    published = Path(publish_weights(run / "model_final.pth"))
    code, out, err = inspect(run)
    published.unlink()

    assert code == 0
    assert err == ""
    found = {
        name: (cells[1], *cells[6:]) for name, cells in rows(out).items() if name.endswith(".pth")
    }
    assert found.pop("model_best.pth") in {("5", "intact"), ("10", "intact")}
    del found[published.name]  # it has no iteration
    assert rows(out)[published.name][-1] == "intact"
    assert found == {"model_0000004.pth": ("5", "intact"), "model_final.pth": ("10", "intact")}
    assert out.endswith("\nThe run has finished after 10 iterations.\n")

    assert inspect(small)[1].endswith("\n--resume continues from model_0000029.pth.\n")

    damage(small / "model_0000029.pth")
    torch.save({"a": np.ones(2)}, small / "numpy.pth")
    code, out, _ = inspect(small)

    assert code == 1
    found = rows(out)
    assert found["model_0000029.pth"][-1] == "BROKEN"
    assert found["numpy.pth"][-1] == "BROKEN"
    assert found["model_0000019.pth"][-1] == "intact"
    assert f"'{small}/model_0000029.pth' is damaged" in out
    assert out.endswith("\n--resume continues from model_0000019.pth.\n")


def test_a_copy_is_identical_though_its_bytes_differ_and_nothing_is_written(run, small, inspect):
    torch.save(read_file(run / "model_final.pth"), small / "copy.pth")
    code, out, _ = inspect(run / "model_final.pth", small / "copy.pth")
    assert code == 0
    assert out.split(":")[0] == "identical"
    assert out.count("\n") == 1

    def content(folder):
        return {
            path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()
        }

    (small / ".model.pth.01234567.trainkit-tmp").touch()  # what a resume would remove
    for folder in (run, small):
        before = content(folder)
        inspect(folder)
        for path in folder.glob("*.pth"):
            inspect(path)
        assert content(folder) == before


def test_two_files_differ_in_keys_shapes_types_and_values(tmp_path, inspect):
    weight, same = torch.tensor([1.0, 2.0, 3.0]), torch.ones(1)
    other = weight + torch.tensor([0, 0.5, -2])
    left = {
        "model": {"w": weight, "a": torch.ones(2), "same": same},
        "iteration": 3,
        "scheduler": {"x": 1},
    }
    model = {"w": other, "a": torch.ones(2, 1), "b": torch.ones(1), "same": same.clone()}
    write_file(left, tmp_path / "left.pth")
    write_file(
        {"model": model, "iteration": 5, "trainer": {"rng": {"python": 1}}}, tmp_path / "right.pth"
    )

    code, out, _ = inspect(tmp_path / "left.pth", tmp_path / "right.pth")

    assert code == 1
    assert out.splitlines() == [
        "model/w: 2 of 3 values, by at most 2",
        "model/a: torch.float32 [2] and torch.float32 [2, 1]",
        "model/b: only in the second",
        "iteration: 3 and 5",
        "scheduler: only in the first",
        "trainer: only in the second",
        "different in 6 places",
    ]


def test_two_runs_differ_in_files_checkpoints_and_metrics(run, tmp_path, inspect):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    lines = [json.loads(line) for line in (copy / "metrics.json").read_text().splitlines()]
    for line in lines:
        line["time"] = 99.0
    (copy / "metrics.json").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    code, out, _ = inspect(run, copy)
    assert code == 0
    assert out.count("\n") == 1
    assert out.startswith("identical: 3 checkpoints, and 7 lines of metrics, ")

    lines[0]["lr"] = 0.5
    (copy / "metrics.json").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    state = read_file(copy / "model_final.pth")
    state["model"]["layers.0.bias"][3] += 1
    write_file(state, copy / "model_final.pth")
    (copy / "model_best.pth").unlink()
    code, out, _ = inspect(run, copy)
    assert code == 1
    rate, best, bias, end = out.splitlines()
    assert rate.startswith("metrics.json: iteration 1: ")
    assert rate.endswith("lr: 0.05005 and 0.5")
    assert best.startswith("model_best.pth: only in")
    assert bias.startswith("model_final.pth: model/layers.0.bias: ")
    assert bias.endswith("1 of 8 values, by at most 1")
    assert end == "different in 3 places"

    (copy / "metrics.json").write_text('{"iteration": 1, "lr": \x1b[2J')
    code, out, err = inspect(run, copy)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert "as lines of metrics" in err
    assert inspect(run, copy / "model_final.pth")[0] == 2
    assert inspect(tmp_path, copy)[0] == 2
