"""A trained model as a file of torch.export, of ONNX and of safetensors."""

import json
import struct

import pytest
import torch
from torch import nn
from trainkit.projects.export import __main__ as command
from trainkit.projects.export.program import compare, export

from tests.engine.job import tiny_cfg
from tests.tools.digits_run import in_one_piece
from trainkit.checkpoint import Checkpointer
from trainkit.checkpoint.file import read_file
from trainkit.config import ConfigError
from trainkit.engine import DefaultPredictor, DefaultTrainer
from trainkit.modeling import build_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a short run of the digits."""
    return in_one_piece(tmp_path_factory.mktemp("digits"), "SOLVER.MAX_ITER", 4).folder


def main(*words):
    return command.main(command.parse_args([*map(str, words)]))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_the_file_gives_what_the_model_gives_for_batches_of_any_size(run, tmp_path, capsys, suffix):
    path = tmp_path / f"digits.{suffix}"
    if suffix == "onnx":
        runtime = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")

    assert main(run, path) == 0

    printed = capsys.readouterr().out
    assert "inputs   image [batch, 1, 8, 8]\n" in printed
    name, batch, classes, dtype, _, verdict = printed.splitlines()[-1].split()
    assert name == "output"
    assert batch == "[batch,"
    assert classes == "10]"
    assert dtype == "float32"
    assert verdict == "yes"
    cfg = command.build_cfg(command.parse_args([str(run), str(path)]))
    model = DefaultPredictor(cfg).model
    images = torch.rand(7, 1, 8, 8)
    if suffix == "onnx":
        session = runtime.InferenceSession(path)
        (image,) = session.get_inputs()
        assert image.name == "image"
        assert image.shape == ["batch", 1, 8, 8]
        assert [*tmp_path.iterdir()] == [path]  # weights included
        (given,) = map(torch.from_numpy, session.run(None, {"image": images.numpy()}))
    else:
        given = torch.export.load(path).module()({"image": images})
    with torch.no_grad():
        torch.testing.assert_close(given, model({"image": images}), rtol=1e-4, atol=1e-6)


def test_outputs_that_differ_are_seen_and_the_table_says_which():
    def compared(difference):
        x = torch.ones(2, 3)
        program = lambda batch: [batch["x"] + difference, batch["x"]]  # noqa: E731
        is_equal, table = compare(
            lambda batch: {"a": batch["x"], "b": batch["x"]}, program, [{"x": x}]
        )
        return is_equal, [line.split()[-1] for line in table.splitlines()[2:]]

    assert compared(0.0) == (True, ["yes", "yes"])
    assert compared(0.1) == (False, ["NO", "yes"])


@pytest.mark.slow
def test_what_cannot_be_exported_is_said(run, tmp_path):
    with pytest.raises(
        ConfigError, match="has the suffix '.pth'; accepted: .pt2, .onnx, .safetensors"
    ):
        main(run, tmp_path / "a.pth")

    class Branch(nn.Module):
        def forward(self, batch):
            return batch["x"] if batch["x"].sum() > 0 else -batch["x"]

    with pytest.raises(
        ConfigError, match="cannot be exported, change what torch.export does not understand"
    ):
        export(Branch(), {"x": torch.ones(2, 3)}, tmp_path / "a.pt2")


# ---------------------------------------------------------------------------- weights alone


def tensors_of(path):
    """name -> type, shape and bytes, read by the description of the format.

    A file has the length of a header, 8 bytes; the header, JSON; and the bytes of the tensors.
    """
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    data = content[8 + length :]
    found = {}
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], data[start:end])
    return found


def test_safetensors_get_the_weights_of_the_last_checkpoint_of_a_finished_run(tmp_path, capsys):
    pytest.importorskip("safetensors")
    cfg = tiny_cfg(tmp_path / "run", "IMPORTS", ["tests.engine.job"], "DATASETS.TEST", ())
    cfg.merge_from_list(["DATASETS.VAL", ()])  # no examples are needed
    DefaultTrainer(cfg).train()
    (tmp_path / "run/config.yaml").write_text(cfg.dump())
    path = tmp_path / "tiny.safetensors"

    assert main(tmp_path / "run", path) == 0

    weights = read_file(tmp_path / "run/model_final.pth")["model"]
    types = {torch.float32: "F32", torch.int64: "I64"}
    assert tensors_of(path) == {
        name: (types[x.dtype], list(x.shape), x.numpy().tobytes()) for name, x in weights.items()
    }
    assert capsys.readouterr().out.splitlines()[2:] == ["values   91 in 9 tensors", "equal    yes"]


def test_safetensors_that_hold_another_weight_are_seen(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    cfg = tiny_cfg("elsewhere", "IMPORTS", ["tests.engine.job"])
    (tmp_path / "config.yaml").write_text(cfg.dump())
    Checkpointer(build_model(cfg), tmp_path).save("model_final")
    whole = command.make_format("safetensors")

    class LosesOne:
        def write(self, state, path):
            changed = dict(state["model"])
            name = next(iter(changed))
            changed[name] = changed[name] + 1e-6
            whole.write({"model": changed}, path)

        read = whole.read

    monkeypatch.setattr(command, "make_format", lambda name: LosesOne())
    assert main(tmp_path, tmp_path / "tiny.safetensors") == 1
