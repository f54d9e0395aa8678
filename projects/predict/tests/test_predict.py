"""What is predicted from which weights, for samples from where, and what is told of it."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from trainkit.projects.predict import __main__ as predict
from trainkit.projects.predict.report import describe
from trainkit.projects.predict.samples import samples_of_file

from tests.engine.job import tiny_cfg
from tests.tools import command
from trainkit.checkpoint import Checkpointer
from trainkit.config import ConfigError
from trainkit.data import TRANSFORM_REGISTRY, DatasetCatalog, MetadataCatalog
from trainkit.engine import DefaultPredictor
from trainkit.modeling import MODEL_REGISTRY, build_model

SAMPLES = DatasetCatalog.get("tiny_test")
INPUTS = torch.stack([sample["x"] for sample in SAMPLES])  # [10, 4]
NAMES = ["no", "yes"]


def save(folder, name="model_final", seed=0, **options):
    """The folder of a run as far as it is needed, with random weights in one more checkpoint."""
    cfg = tiny_cfg("elsewhere", "IMPORTS", ["tests.engine.job"])
    cfg.merge_from_list([item for pair in options.items() for item in pair])
    (folder / "config.yaml").write_text(cfg.dump())
    torch.manual_seed(seed)
    Checkpointer(build_model(cfg), folder).save(name)
    return cfg


@pytest.fixture(autouse=True)
def class_names(catalogs):
    MetadataCatalog.get("tiny_test").set(class_names=NAMES)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    save(folder)
    return folder


@pytest.fixture
def call(capsys):
    """Run the command; returns the rows that it prints, its errors, and its exit code."""

    def call(*args):
        code, out, err = command.call(predict, capsys, *args)
        return (
            [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()],
            err,
            code,
        )

    return call


def test_samples_of_a_dataset_are_told_with_their_best_classes(run, call, tmp_path):
    rows, err, _ = call(run, "--dataset", "tiny_test", "--num", 3)

    predictor = DefaultPredictor(
        tiny_cfg("elsewhere", "MODEL.WEIGHTS", str(run / "model_final.pth"))
    )
    outputs = torch.stack(predictor(SAMPLES))  # [10, 2]
    probs = outputs[:3].softmax(dim=1)
    assert rows == [
        {
            "sample": i,
            "label": NAMES[sample["label"]],
            "prediction": [
                {"class": NAMES[index], "index": index, "prob": round(probs[i, index].item(), 6)}
                for index in probs[i].argsort(descending=True).tolist()
            ],
        }
        for i, sample in enumerate(SAMPLES[:3])
    ]
    assert err == f"3 predictions with {run}/model_final.pth\n"
    rows, err, _ = call(run, "--dataset", "tiny_test", "--output", tmp_path / "out.pt")
    assert rows == []
    assert err == f"10 predictions with {run}/model_final.pth\n"
    # kernels may add in another order where batches have another size
    torch.testing.assert_close(torch.stack(torch.load(tmp_path / "out.pt")), outputs)


def used(call, *args):
    _, err, code = call(*args, "--dataset", "tiny_test", "--num", 1)
    assert code == 0, err
    return err.removeprefix("1 predictions with ").rstrip()


def test_the_weights_are_those_asked_for_else_the_best_else_the_last(run, call, tmp_path):
    save(run, "model_0000009", seed=1)
    assert used(call, run) == f"{run}/model_0000009.pth"  # which last_checkpoint names
    (run / "model_0000009.pth").write_bytes(b"broken")
    assert used(call, run) == f"{run}/model_final.pth"
    save(run, "model_best", seed=2, **{"CHECKPOINT.BEST_METRIC": "a/b"})
    assert used(call, run) == f"{run}/model_best.pth"
    assert used(call, run, "--weights", run / "model_final.pth") == f"{run}/model_final.pth"
    (run / "config.yaml").rename(tmp_path / "config.yaml")
    config = ("--config-file", tmp_path / "config.yaml", "--opts", "OUTPUT_DIR", run)
    assert used(call, *config) == f"{run}/model_best.pth"


@TRANSFORM_REGISTRY.register()
def OnlyX(cfg):
    return lambda sample: {"x": sample["x"]}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_whole_dataset_is_predicted_in_its_order_with_the_names_of_its_samples(
    run, call, tmp_path, workers
):
    """Also if the transform drops the names, and with as many workers as an evaluation."""
    named = [
        {**sample, "file_name": f"{i}.png", "image_id": torch.tensor(i)}
        for i, sample in enumerate(SAMPLES)
    ]
    DatasetCatalog.register("named", lambda: named)
    options = [
        "--opts",
        "INPUT.TEST_TRANSFORM",
        "OnlyX",
        "DATALOADER.NUM_WORKERS",
        workers,
        "TEST.IMS_PER_BATCH",
        4,
    ]
    rows = call(run, "--dataset", "named", *options)[0]
    assert call(run, "--dataset", "named", "--num", 5, *options)[0] == rows[:5]
    told = [(row["sample"], row["file_name"], row["image_id"], row["label"]) for row in rows]
    assert told == [(i, f"{i}.png", i, sample["label"]) for i, sample in enumerate(SAMPLES)]
    expected = call(run, "--dataset", "tiny_test", "--opts", "INPUT.TEST_TRANSFORM", "")[0]
    scores = [max(entry["prob"] for entry in row["prediction"]) for row in expected]
    assert [
        max(torch.tensor(row["prediction"]).softmax(0).tolist()) for row in rows
    ] == pytest.approx(scores, rel=1e-4)


def test_every_kind_of_file_gives_what_the_dataset_gives(run, call, tmp_path):
    inputs, expected = INPUTS.numpy(), call(run, "--dataset", "tiny_test")[0]
    np.save(tmp_path / "a.npy", inputs)
    np.savez(tmp_path / "b.npz", x=inputs, label=[sample["label"] for sample in SAMPLES])
    torch.save(INPUTS, tmp_path / "c.pt")
    torch.save([{"x": row} for row in INPUTS], tmp_path / "d.pth")
    torch.save({"x": INPUTS}, tmp_path / "e.pt")
    (tmp_path / "f.jsonl").write_text(
        "\n".join(json.dumps({"x": row.tolist()}) for row in INPUTS) + "\n\n"
    )
    for file in sorted(tmp_path.glob("?.*")):
        rows, err, _ = call(run, "--input", file, "--key", "x")
        told = {"sample", "prediction"} | ({"label"} if file.name == "b.npz" else set())
        assert rows == [
            {key: value for key, value in row.items() if key in told} for row in expected
        ], (file, err)

    rows = call(run, "--input", tmp_path / "a.npy", tmp_path / "c.pt", "--key", "x", "--num", 14)[0]
    assert [row["prediction"] for row in rows] == [
        row["prediction"] for row in [*expected, *expected[:4]]
    ]


def test_scores_are_told_as_classes_and_other_predictions_by_their_values_or_their_range():
    scores, names = torch.tensor([1.0, 3.0, 2.0]), ["a", "b", "c"]
    assert describe(torch.tensor([0.25, 0.75, 0.0]), names, 1) == [
        {"class": "b", "index": 1, "prob": 0.75}
    ]
    assert describe(scores, ["a", "b"], None) == [1.0, 3.0, 2.0]
    assert describe(scores, [], 1)[0]["class"] == "1"
    assert describe(torch.tensor([1, 3, 2]), names, None) == [1, 3, 2]  # no scores
    best = torch.tensor([[0, 0], [2, 0]])
    assert describe(nn.functional.one_hot(best, 3).permute(2, 0, 1).float(), names, None) == [
        {"class": "a", "index": 0, "pixels": 0.75},
        {"class": "c", "index": 2, "pixels": 0.25},
    ]
    large = torch.arange(32.0).reshape(4, 8)
    prediction = {"boxes": large, "both": (torch.tensor(2), [1.5, "x", None]), "odd": torch.float32}
    expected = {
        "boxes": {"shape": [4, 8], "min": 0.0, "max": 31.0, "mean": 15.5},
        "both": [2, [1.5, "x", None]],
    }
    assert describe(prediction, names, None) == {**expected, "odd": "torch.float32"}


@MODEL_REGISTRY.register()
class FailsAtTwo(nn.Module):
    """Returns its input with two values that are no numbers; a batch of two samples is an error."""

    def __init__(self, cfg):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        if len(batch["x"]) == 2:
            raise ZeroDivisionError("no prediction")
        bad = torch.tensor([[float("nan"), float("inf")]] * len(batch["x"]))
        return torch.cat([batch["x"], bad], dim=1)


def test_a_file_is_replaced_only_when_all_is_predicted_and_numbers_that_are_not_finite_are_null(
    tmp_path, call
):
    save(tmp_path, **{"MODEL.NAME": "FailsAtTwo", "INPUT.TEST_TRANSFORM": ""})
    file = tmp_path / "old.jsonl"
    file.write_text("kept")
    words = [
        tmp_path,
        "--dataset",
        "tiny_test",
        "--output",
        file,
        "--opts",
        "TEST.IMS_PER_BATCH",
        4,
    ]
    with pytest.raises(ZeroDivisionError):  # in the third batch
        call(*words)
    assert file.read_text() == "kept"
    call(*words[:5], "--num", 8, *words[5:])
    assert [json.loads(line)["prediction"][4:] for line in file.read_text().splitlines()] == [
        [None, None]
    ] * 8
    assert [path.name for path in tmp_path.iterdir() if "old" in path.name] == [file.name]


def mistake(call, *args):
    rows, err, code = call(*args)
    assert rows == []
    assert code == 2
    return err.splitlines()[-1].partition("error: ")[2]


def test_mistakes_in_the_command_and_in_files_of_samples_are_one_line(run, call, tmp_path):
    wanted = ("--dataset", "tiny_test")
    assert "--config-file" in mistake(call, *wanted)
    assert "did you mean 'tiny_test'?" in mistake(call, run, "--dataset", "tiny_tset")
    assert "No such file" in mistake(call, run, *wanted, "--weights", tmp_path / "x.pth")
    assert "ends in .jsonl or .pt, got 'a.csv'" in mistake(call, run, *wanted, "--output", "a.csv")

    np.save(tmp_path / "objects.npy", np.array([{}]))
    np.save(tmp_path / "shape.npy", np.ones((2, 5), np.float32))
    torch.save([np.ones(4)], tmp_path / "pickle.pt")
    (tmp_path / "lines.jsonl").write_text('{"x": [1, 2, 3, 4]}\n{"x":\n')
    expected = {
        "absent.npy": "absent.npy' cannot be read: No such file or directory",
        "image.bmp": "has the suffix '.bmp'; accepted: ",
        "objects.npy": "objects.npy' cannot be read: ValueError: ",
        "pickle.pt": "pickle.pt' is refused: it needs numpy.",
        "lines.jsonl": "is not JSON in line 2: ",
        "shape.npy": "samples 0 to 1 cannot be predicted: ",
    }
    for name, text in expected.items():
        assert text in mistake(call, run, "--input", tmp_path / name, "--key", "x")
    for name in ("model_final.pth", "last_checkpoint"):
        (run / name).unlink()
    assert "there is no checkpoint in" in mistake(call, run, *wanted)


def test_a_picture_is_a_sample_of_its_pixels(tmp_path):
    color = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    for name, array in (("c.png", color), ("g.PNG", color[:, :, 0])):
        Image.fromarray(array).save(tmp_path / name)
        (sample,) = samples_of_file(str(tmp_path / name), "image")
        assert np.array_equal(sample["image"], array)
    Image.fromarray(color).convert("RGBA").save(tmp_path / "a.png")
    (transparent,) = samples_of_file(str(tmp_path / "a.png"), "")
    assert np.array_equal(transparent, color)


def test_a_picture_without_the_package_that_reads_it_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"a\.png' is a picture .* pip install pillow"):
        list(samples_of_file(str(tmp_path / "a.png"), ""))


SCRIPT = """
import torch
from torch import nn
from trainkit.engine import DefaultTrainer


class Base(DefaultTrainer):
    pass


class Trainer(Base):
    @classmethod
    def build_model(cls, cfg):
        model = nn.Linear(4, 2)
        model.forward = lambda batch: nn.functional.linear(batch["x"], model.weight, model.bias)
        return model

    @classmethod
    def build_test_loader(cls, cfg, dataset_name):
        return [{"x": torch.ones(1, 4), "name": ["a"]}, {"x": torch.zeros(2, 4), "name": ["b", "c"]}]


if __name__ == "__main__":
    raise AssertionError("it trains")
"""


def test_a_script_may_register_what_the_config_names(tmp_path, call, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr(MODEL_REGISTRY, "_objects", {**MODEL_REGISTRY._objects})
    script = tmp_path / "registers.py"
    build = SCRIPT.partition("    def build_model(cls, cfg):\n")[2].partition("    @classmethod")[0]
    function = "@MODEL_REGISTRY.register()\ndef Mine(cfg):\n" + build.replace("        ", "    ")
    imports = "import torch\nfrom torch import nn\nfrom trainkit.modeling import MODEL_REGISTRY\n"
    script.write_text(f"{imports}\n\n{function}")
    cfg = tiny_cfg("elsewhere", "MODEL.NAME", "Mine", "IMPORTS", [], "INPUT.TEST_TRANSFORM", "")
    (tmp_path / "config.yaml").write_text(cfg.dump())
    model = nn.Linear(4, 2)
    Checkpointer(model, tmp_path).save("model_final")
    expected = nn.functional.softmax(model(torch.ones(4)), dim=0)
    (tmp_path / "x.jsonl").write_text('{"x": [1.0, 1.0, 1.0, 1.0]}\n')
    [row] = call(tmp_path, "--input", tmp_path / "x.jsonl", "--top-k", 2, "--script", script)[0]
    found = {entry["index"]: entry["prob"] for entry in row["prediction"]}
    assert [found[0], found[1]] == pytest.approx(expected.tolist(), abs=1e-6)


def test_the_model_of_a_script_that_no_registry_knows_predicts_also_for_its_own_loader(
    tmp_path, call, monkeypatch
):
    monkeypatch.setattr("sys.path", [*sys.path])
    script = tmp_path / "own_job.py"
    script.write_text(SCRIPT)
    cfg = tiny_cfg("elsewhere", "MODEL.NAME", "", "IMPORTS", [], "DATASETS.TEST", ("mine",))
    (tmp_path / "config.yaml").write_text(cfg.dump())
    model = nn.Linear(4, 2)
    Checkpointer(model, tmp_path).save("model_final")
    expected = nn.functional.softmax(model(torch.ones(4)), dim=0)
    (tmp_path / "x.jsonl").write_text('{"x": [1.0, 1.0, 1.0, 1.0]}\n')
    words = [tmp_path, "--input", tmp_path / "x.jsonl", "--top-k", 2]
    options = ["--opts", "INPUT.TEST_TRANSFORM", ""]
    rows = call(*words, "--script", f"{script}:Trainer", *options)[0]
    found = {entry["index"]: entry["prob"] for entry in rows[0]["prediction"]}
    assert [found[0], found[1]] == pytest.approx(expected.tolist(), abs=1e-6)

    of_loader = call(tmp_path, "--dataset", "mine", "--script", script, "--num", 2, *options)[0]
    assert [(row["sample"], row["name"]) for row in of_loader] == [(0, "a"), (1, "b")]

    sys.path.insert(0, str(tmp_path))  # by IMPORTS
    assert call(*words, *options, "IMPORTS", "[own_job]")[0] == rows
    sys.modules.pop("own_job")

    assert "name its file: --script" in call(*words, *options)[1]
    script.write_text(SCRIPT + "\nclass B(Base): pass\n")
    assert "got several (B, Trainer); name one, such as " in mistake(
        call, *words, "--script", script
    )
    script.write_text("x = 1")
    assert "must define a subclass of DefaultTrainer" in mistake(call, *words, "--script", script)
