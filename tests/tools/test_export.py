"""A trained model as a file of torch.export and of ONNX."""

import pytest
import torch
from torch import nn

from tests.tools.digits_run import in_one_piece
from tools import export
from trainkit.config import ConfigError
from trainkit.engine import DefaultPredictor


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a short run of the digits."""
    return in_one_piece(tmp_path_factory.mktemp("digits"), "SOLVER.MAX_ITER", 4).folder


def main(*words):
    return export.main(export.parse_args([*map(str, words)]))


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
    assert printed.splitlines()[-1].split() == [
        "output",
        "[batch,",
        "10]",
        "float32",
        printed.split()[-2],
        "yes",
    ]
    cfg = export.build(export.parse_args([str(run), str(path)]))
    model = DefaultPredictor(cfg).model
    images = torch.rand(7, 1, 8, 8)
    if suffix == "onnx":
        session = runtime.InferenceSession(path)
        assert [entry.name for entry in session.get_inputs()] == ["image"]
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
        is_equal, table = export.compare(
            lambda batch: {"a": batch["x"], "b": batch["x"]}, program, [{"x": x}]
        )
        return is_equal, [line.split()[-1] for line in table.splitlines()[2:]]

    assert compared(0.0) == (True, ["yes", "yes"])
    assert compared(0.1) == (False, ["NO", "yes"])


@pytest.mark.slow
def test_what_cannot_be_exported_is_said(run, tmp_path):
    with pytest.raises(ConfigError, match="has the suffix '.pth'; accepted: .pt2, .onnx"):
        main(run, tmp_path / "a.pth")

    class Branch(nn.Module):
        def forward(self, batch):
            return batch["x"] if batch["x"].sum() > 0 else -batch["x"]

    with pytest.raises(
        ConfigError, match="cannot be exported, change what torch.export does not understand"
    ):
        export.export(Branch(), {"x": torch.ones(2, 3)}, tmp_path / "a.pt2")
