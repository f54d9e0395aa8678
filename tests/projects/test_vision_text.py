"""Models of torchvision, timm and Hugging Face by a config and by a subclass, and the page that says how."""

import importlib
import re
import shlex
import sys

import pytest
import torch
from torch.nn import functional as F
from trainkit.projects.predict import __main__ as predict

from projects.vision_text import ToImage
from projects.vision_text.job import start
from tests.docs.pages import ROOT, blocks, run
from tests.projects.torchvision_here import need
from tools import analyze_model, train_net
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.config import get_cfg, import_modules
from trainkit.data import DatasetCatalog, build_train_loader
from trainkit.engine import SimpleTrainer, default_argument_parser
from trainkit.modeling import build_model, losses_from
from trainkit.solver import LAYER_DEPTH_REGISTRY
from trainkit.utils.env import seed_all_rng
from trainkit.utils.logger import close_logger

PAGE = "docs/bring_your_model.md"
REGISTERED, SCRIPT, FINE_TUNE, RENAME, DETECTOR, LAYERS, METRIC = blocks(PAGE, "python")
(TOOLS,) = blocks(PAGE, "sh")
BY_CONFIG, VIT_LAYERS, RESNET_LAYERS, OPTIMIZERS = blocks(PAGE, "yaml")
FOLDER = ROOT / "projects/vision_text"
NEEDS = {
    "resnet18": ["torchvision"],
    "vit": ["torchvision", "timm"],
    "encoder": ["transformers"],
    "lm": ["transformers"],
}
SHORT = [
    "SOLVER.MAX_ITER",
    "3",
    "SOLVER.WARMUP_ITERS",
    "1",
    "TEST.MAX_BATCHES",
    "1",
    "MODEL.DEVICE",
    "cpu",
]
JOBS = pytest.mark.parametrize("job", NEEDS)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config(job, *options):
    cfg = get_cfg()
    cfg.merge_from_file(FOLDER / f"{job}.yaml")
    cfg.merge_from_list([*SHORT, *options])
    return cfg


def model_of(job):
    need(*NEEDS[job])
    torch.manual_seed(0)
    cfg = config(job)
    import_modules(cfg.IMPORTS)
    return build_model(cfg)


@pytest.mark.slow
@JOBS
def test_a_config_trains_it_and_so_does_a_subclass(job, capsys):
    need(*NEEDS[job])
    args = default_argument_parser().parse_args(
        ["--config-file", str(FOLDER / f"{job}.yaml"), *SHORT]
    )
    results = train_net.main(args)
    assert "The run has finished after 3 of 3 iterations" in capsys.readouterr().out
    assert set(results) == ({"loss"} if job == "lm" else {"classification", "loss"})
    close_logger()
    module = importlib.import_module(f"projects.vision_text.{job}")
    options = re.search(r"\n    start\(Trainer, (.*)\)\n$", (FOLDER / f"{job}.py").read_text())[1]
    results = start(module.Trainer, eval(options, vars(module)), SHORT)
    assert set(results) == (set() if job == "lm" else {"classification", "loss"})
    assert "The run has finished after 3 of 3 iterations" in capsys.readouterr().out


@pytest.mark.slow
@JOBS
def test_it_gives_the_loss_and_the_logits_of_the_library_and_keeps_all_names(job):
    model, plain = model_of(job), model_of(job)
    # losses_from put its own on the model; that of the library is left, with the same weights
    del plain.forward
    dataset = DatasetCatalog.get(config(job).DATASETS.TRAIN[0])
    samples = [dataset[i] if "image" not in dataset[i] else ToImage()(dataset[i]) for i in range(4)]
    batch = torch.utils.data.default_collate(samples)
    assert model.state_dict().keys() == plain.state_dict().keys()
    inputs = {name: value for name, value in batch.items() if not name.startswith("label")}
    for mode in (True, False):
        model.train(mode), plain.train(mode)
        torch.manual_seed(1)
        found = model(batch)
        torch.manual_seed(1)
        if job == "lm":
            returned = plain(**batch)
            expected = returned.loss if mode else returned.logits
        else:
            returned = plain(inputs["image"]) if "image" in inputs else plain(**inputs).logits
            expected = F.cross_entropy(returned, batch["label"]) if mode else returned
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_the_config_of_the_page_trains_the_model_of_the_page(tmp_path, monkeypatch, capsys):
    need("torchvision", "torchmetrics")
    code = f"import projects.vision_text.data\n{REGISTERED}\n{METRIC}\n{LAYERS}"
    (tmp_path / "mymodels.py").write_text(code.replace("def Resnet18", "def PageResnet18"))
    config_of_page = BY_CONFIG.replace("Resnet18", "PageResnet18")
    (tmp_path / "my.yaml").write_text(f"{config_of_page}{RESNET_LAYERS.strip()}\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = [
        "INPUT.TRAIN_TRANSFORM",
        "ToImage",
        "INPUT.TEST_TRANSFORM",
        "ToImage",
        "OUTPUT_DIR",
        "out",
    ]
    options += ["TEST.EVALUATORS", "[ClassificationEvaluator, F1]"]
    options += ["CHECKPOINT.BEST_METRIC", "torchmetrics/f1", "CHECKPOINT.BEST_MODE", "max"]
    options += ["TEST.EVAL_PERIOD", "2", "DATALOADER.NUM_WORKERS", "0", "TEST.IMS_PER_BATCH", "120"]
    options += ["SOLVER.STEPS", "[]", "SOLVER.IMS_PER_BATCH", "16"]
    results = train_net.main(
        default_argument_parser().parse_args(["--config-file", "my.yaml", *SHORT, *options])
    )

    assert 0 <= results["torchmetrics"]["f1"] <= 1
    assert (tmp_path / "out/model_best.pth").exists()
    # as in vit.yaml and encoder.yaml
    assert "LAYER_DECAY: {RATE: 0.8, SCHEME: vit, NUM_LAYERS: 2}" in VIT_LAYERS
    assert "{NAME: Muon, LR: 0.02, MOMENTUM: 0.95" in OPTIMIZERS  # as in vit.yaml
    names = [name for name, _ in model_of("resnet18").named_parameters()]
    ours, of_page = (
        map(LAYER_DEPTH_REGISTRY.get(name), names) for name in ("resnet_layers", "resnet_depth")
    )
    assert [*ours] == [*of_page]


@pytest.mark.slow
def test_the_script_of_the_page_is_trained_counted_and_predicts(tmp_path, monkeypatch, capsys):
    need("torchvision")
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["train.py", "MODEL.DEVICE", "cpu"])
    run(SCRIPT, "train.py", __name__="__main__")
    assert "The run has finished after 8 of 8 iterations" in capsys.readouterr().out

    command = ["--config-file", "output/mine/config.yaml", "--script", "train.py", "--depth", "0"]
    analyze_model.main(analyze_model.parse_args(command))
    assert re.search(r"^In all: 11,178,051 parameters, ", capsys.readouterr().out, re.MULTILINE)

    close_logger()
    (command,) = re.findall(r"^python -m trainkit.projects.predict (.+)$", TOOLS, re.MULTILINE)
    predict.main(predict.parse_args(shlex.split(command)))
    assert len(capsys.readouterr().out.splitlines()) == 3

    del sys.modules["train"]


@pytest.mark.slow
def test_the_head_is_trained_on_a_folder_of_images_and_all_else_stays(
    tmp_path, monkeypatch, capsys
):
    need("torchvision")
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "test"):
        for name, color in (("cat", "red"), ("dog", "blue")):
            (tmp_path / "pictures" / part / name).mkdir(parents=True)
            for number in range(2):
                picture = image.new("RGB", (40, 40), color)
                picture.save(tmp_path / "pictures" / part / name / f"{number}.png")
    script = FINE_TUNE.replace("weights=ResNet18_Weights.DEFAULT", "weights=None")  # no download
    assert script != FINE_TUNE
    options = ["MODEL.DEVICE", "cpu", "SOLVER.IMS_PER_BATCH", "4", "DATALOADER.NUM_WORKERS", "0"]
    monkeypatch.setattr(sys, "argv", ["train.py", *options, "SEED", "0"])
    run(script, "train.py", __name__="__main__")
    assert "The run has finished after 3 of 3 iterations" in capsys.readouterr().out

    trained = torch.load("output/pictures/model_final.pth", weights_only=False)["model"]
    seed_all_rng(0)
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.NUM_CLASSES", 2])
    untrained = run(script, "train.py")["Trainer"].build_model(cfg).state_dict()
    changed = [name for name in untrained if not torch.equal(trained[name], untrained[name])]
    assert changed == ["fc.weight", "fc.bias"]


def test_weights_are_renamed_and_those_of_another_shape_are_left_out(caplog):
    theirs = torch.nn.ModuleDict({"stem": torch.nn.Linear(3, 4), "head": torch.nn.Linear(4, 10)})
    mine = torch.nn.ModuleDict({"stem": torch.nn.Linear(3, 4), "head": torch.nn.Linear(4, 2)})
    head = mine["head"].weight.clone()
    weights = {f"backbone.{name}": weight for name, weight in theirs.state_dict().items()}
    torch.save(weights, "their.pth")
    with pytest.raises(CheckpointError, match="does not fit"):
        Checkpointer(mine).load("their.pth")
    run(RENAME, PAGE)
    Checkpointer(mine).load("base.pth")
    assert "'head.weight' is left out: it has the shape (10, 4)" in caplog.text
    assert torch.equal(mine["stem"].weight, theirs["stem"].weight)
    assert torch.equal(mine["head"].weight, head)


@pytest.mark.slow
def test_a_model_of_timm_reads_gray_images():
    need("torchvision", "timm")
    [call] = re.findall(r"`(losses_from\(timm\..+?)` reads", (ROOT / PAGE).read_text())
    names = {"losses_from": losses_from, "timm": importlib.import_module("timm"), "F": F}
    model = eval(call, names)
    batch = {"image": torch.rand(4, 1, 32, 32), "label": torch.tensor([0, 1, 2, 0])}
    assert model(batch).requires_grad
    assert model.eval()(batch).shape == (4, 3)


@pytest.mark.slow
def test_the_collator_of_hugging_face_pads_texts():
    need("transformers")
    tokenizers, transformers = map(importlib.import_module, ("tokenizers", "transformers"))
    words = tokenizers.models.WordLevel({"[PAD]": 0, "a": 1, "b": 2}, unk_token="[PAD]")
    splits = tokenizers.Tokenizer(words)
    splits.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=splits, pad_token="[PAD]")
    samples = [{**tokenizer(text), "label": len(text) % 2} for text in ("a", "a b", "a b a")]
    cfg = get_cfg()
    cfg.merge_from_list(["DATALOADER.NUM_WORKERS", 0, "SOLVER.IMS_PER_BATCH", 3])
    [call] = re.findall(r"`(build_train_loader\(cfg, .+Padding.+?)`", (ROOT / PAGE).read_text())
    names = {"build_train_loader": build_train_loader, "samples": samples, "cfg": cfg}
    names |= {"tokenizer": tokenizer}
    names |= {"DataCollatorWithPadding": transformers.DataCollatorWithPadding}
    batch = next(iter(eval(call, names)))
    assert sorted(batch["input_ids"].tolist()) == [[1, 0, 0], [1, 2, 0], [1, 2, 1]]


@pytest.mark.slow
def test_a_detector_of_torchvision_gives_its_losses(monkeypatch):
    need("torchvision")
    retinanet = importlib.import_module("torchvision.models.detection.retinanet")

    def keep_all(boxes, scores, labels, threshold):
        return torch.arange(len(scores))

    monkeypatch.setattr(retinanet.box_ops, "batched_nms", keep_all)  # its library may be missing
    model = retinanet.retinanet_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=2, min_size=64, max_size=64
    )
    detector = run(DETECTOR, PAGE)["Detector"](model)
    target = {"boxes": torch.tensor([[5.0, 5.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    batch = [{"image": torch.rand(3, 64, 64), "target": target}] * 2
    trainer = SimpleTrainer(detector, [batch], torch.optim.SGD(detector.parameters(), 0.001))
    trainer.train(0, 1)
    assert {"classification", "bbox_regression"} <= trainer.storage.histories().keys()
    found = detector.eval()(batch)
    assert [sorted(each) for each in found] == [["boxes", "labels", "scores"]] * 2
