"""What is counted of a model, and what is said not to be."""

import itertools
import re

import pytest
import torch
from torch import nn

from tests.engine.job import tiny_cfg
from tests.tools import command
from tools import analyze_model
from tools.analyze_model import estimate_memory
from trainkit.engine import DefaultTrainer
from trainkit.modeling import MODEL_REGISTRY, build_model
from trainkit.solver import build_optimizer


class Net(nn.Module):
    """Returns a dict and needs the label, in eval mode too; one layer is frozen, one is not used."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 8).requires_grad_(False)
        self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.unused = nn.Linear(5, 5)
        self.nothing = nn.Identity()
        self.modes = []

    def forward(self, batch):
        self.modes.append(self.training)
        logits = self.nothing(self.head(self.frozen(batch["x"])))
        loss = nn.functional.cross_entropy(logits, batch["label"])
        return {"logits": logits, "loss": loss, "names": batch["name"], "nested": [(logits.exp(),)]}


BATCH = {"x": torch.ones(1, 4), "label": torch.tensor([1]), "name": ["a"]}


def table(text):
    """module -> its numbers, as text"""
    rows = {}
    for line in text.splitlines()[2:]:
        if line.startswith("|"):
            module, *numbers = (cell.strip() for cell in line.strip("|").split("|"))
            rows[module] = numbers
    return rows


def line_after(start, text):
    [line] = [line for line in text.splitlines() if line.startswith(start)]
    return line.removeprefix(start)


def numbers_after(start, text):
    """what is counted -> its number, of ``74 parameters, 74 of them trainable; ...``"""
    parts = re.split("[,;]", line_after(start, text).rstrip("."))
    return {part.split()[-1]: int(part.split()[0]) for part in parts}


def test_each_module_is_counted_in_eval_mode_and_what_is_not_counted_is_named():
    model = Net()
    report = analyze_model.report(model, BATCH)

    # parameters, FLOPs, activations; batch norm: a product and a sum for each of its 8 values
    assert table(report) == {
        "model": ["0.113K", "72", "11"],
        "frozen": ["40", "32", "8"],
        "head": ["43", "40", "3"],
        "head.0": ["16", "16", "0"],
        "head.1": ["27", "24", "3"],
        "unused": ["30", "", ""],
    }
    assert set(model.modes) == {False}
    assert "{'x': [1, 4], 'label': [1], 'name': ['a']}" in line_after("Input:", report)
    assert numbers_after("In all:", report) == {
        "parameters": 113,
        "trainable": 73,
        "FLOPs": 72,
        "activations": 11,
    }
    not_counted = line_after("No FLOPs are counted for:", report).strip(" .").split(", ")
    assert not_counted == ["1 aten::cross_entropy_loss", "1 aten::exp"]
    assert line_after("Not called", report).endswith(": unused.")
    of_depth_1 = analyze_model.report(model, BATCH, depth=1)
    assert list(table(of_depth_1)) == ["model", "frozen", "head", "unused"]


def test_attention_is_counted_although_torch_has_one_operator_for_it():
    layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    flops, activations = analyze_model.count(layer, torch.ones(1, 6, 8))
    # 1536 of the four projections, 288 of each of the two products
    assert flops.total("self_attn") == 2112
    # 48 of each projection and of the result, 36 scores of each head
    assert activations.total("self_attn") == 312
    assert torch.backends.mha.get_fastpath_enabled()


class Boxes:
    """What a detector may return."""

    def __init__(self, values):
        self.values = values


class Detector(nn.Module):
    """Takes more than tensors, and returns something that holds one."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, batch):
        assert batch["scale"] == 2
        assert batch["none"] is None
        return Boxes(self.head(batch["x"]) * batch["scale"])


def test_a_model_may_take_and_return_other_things_than_tensors():
    model = Detector()
    flops, activations = analyze_model.count(
        model, {"x": torch.ones(1, 4), "scale": 2, "none": None}
    )
    assert flops.total() == 12
    assert activations.total() == 3
    # nothing is left in the model
    assert isinstance(model({"x": torch.ones(1, 4), "scale": 2, "none": None}), Boxes)


@pytest.fixture
def call(tmp_path, capsys):
    """Run the command for the tiny job with changed options."""

    def call(*args, options=()):
        (tmp_path / "config.yaml").write_text(tiny_cfg(tmp_path / "out", *options).dump())
        found = command.call(
            analyze_model, capsys, "--config-file", tmp_path / "config.yaml", *args
        )
        assert not (tmp_path / "out").exists()
        return found

    return call


def test_the_command_counts_one_sample_of_the_test_data_or_of_a_shape(call):
    code, out, _ = call()
    assert code == 0
    # FLOPs: 32 of a layer, 16 of batch norm, 16 of a layer
    assert numbers_after("In all:", out) == {
        "parameters": 74,
        "trainable": 74,
        "FLOPs": 64,
        "activations": 10,
    }
    assert "{'x': [1, 4], 'label': [1]}" in line_after("Input:", out)
    assert call(options=("DATASETS.TEST", (), "DATASETS.VAL", ("tiny_val",)))[1] == out

    of_shape = call(
        "--input-shape", "x=4", "--depth", "0", options=("DATASETS.TEST", (), "DATASETS.TRAIN", ())
    )[1]
    assert table(of_shape) == {"layers": table(out)["layers"]}
    assert "{'x': [1, 4]}" in line_after("Input:", of_shape)

    def mistake(*args, **kwargs):
        code, out, err = call(*args, **kwargs)
        assert out == ""
        assert code == 2
        return err.splitlines()[-1].partition("error: ")[2]

    assert "--input-shape" in mistake(options=("DATASETS.TEST", ()))
    text = mistake("--input-shape", "x=5")
    assert text.startswith("the model does not take the input {'x': [1, 5]}: RuntimeError: ")
    assert "got both" in mistake("--input-shape", "4", "--input-shape", "x=4")
    assert "need such as 3,224,224 or image=3,224,224, got 'x='" in mistake("--input-shape", "x=")
    assert "is given twice" in mistake("--input-shape", "x=4", "--input-shape", "x=5")


class Deep(nn.Module):
    """A tied weight, a buffer and a frozen layer."""

    def __init__(self, cfg):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
        )
        self.tied, self.frozen = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)
        self.blocks[0].append(self.tied)
        self.register_buffer("scale", torch.ones(64))

    def forward(self, batch):
        x = self.frozen(batch["x"]) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return {"loss": nn.functional.cross_entropy(self.tied(x), batch["label"])}


MODEL_REGISTRY.register(Deep)


def peak_of_real_steps(cfg, num_samples):
    """Bytes that torch allocates on the CPU for the model and two steps."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        model = build_model(cfg)
        optimizer = build_optimizer(cfg, model)
        batch = {
            "x": torch.randn(num_samples, 64),
            "label": torch.zeros(num_samples, dtype=torch.long),
        }
        for _ in range(2):
            optimizer.zero_grad()
            model(batch)["loss"].backward()
            optimizer.step()
    sizes = [
        event.nbytes()
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    return max(itertools.accumulate(sizes))


@pytest.mark.parametrize("num_samples", [8, 512])
def test_the_estimate_is_what_two_real_steps_allocate(tmp_path, num_samples):
    options = [
        "MODEL.NAME",
        "Deep",
        "SOLVER.OPTIMIZER.NAME",
        "AdamW",
        "SOLVER.IMS_PER_BATCH",
        num_samples,
    ]
    cfg = tiny_cfg(tmp_path, *options)
    sample = {"x": torch.zeros(1, 64), "label": torch.tensor([0])}
    found = estimate_memory(cfg, DefaultTrainer, sample)

    assert found["total"] == pytest.approx(peak_of_real_steps(cfg, num_samples), rel=0.1)
    parameters = sum(p.nbytes for p in build_model(cfg).parameters() if p.requires_grad)
    assert found["parameters"] == parameters
    assert found["optimizer"] == pytest.approx(2 * parameters, rel=0.1)
    cfg.MODEL.PARALLEL = "fsdp"
    sharded = estimate_memory(cfg, DefaultTrainer, sample, ranks=4)
    assert 4 * sharded["parameters"] == parameters
    assert sharded["activations"] < found["activations"]
