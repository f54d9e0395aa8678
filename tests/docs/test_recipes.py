"""The code of docs/recipes.md runs, and does what the page says."""

import copy
import json
import math
import re
import shlex
import statistics

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader

from tests.docs.pages import blocks, page, run
from tests.engine.job import tiny_cfg
from tests.projects.torchvision_here import need
from trainkit.config import CfgNode, check_values, get_cfg
from trainkit.data import TRANSFORM_REGISTRY, DatasetCatalog
from trainkit.engine import DefaultTrainer, SimpleTrainer, hooks
from trainkit.evaluation import inference_on_dataset
from trainkit.solver import build_lr_scheduler

(PICTURES, TEACHER, GROWING, MIXUP, DRAWN, STREAM, LORA, FOLDS, SIMPLE, METRICS, TOKENS) = blocks(
    "docs/recipes.md", "python"
)
OF_PICTURES, DECAY, FROZEN = blocks("docs/recipes.md", "yaml")


@pytest.mark.usefixtures("catalogs")
def test_a_folder_of_pictures_is_a_dataset(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    for part, name in [("train", "cat"), ("train", "dog"), ("test", "dog")]:
        path = tmp_path / "pictures" / part / name / "1.png"
        path.parent.mkdir(parents=True)
        picture = image.new("RGB", (32, 32))
        picture.putpixel((0, 0), (255, 0, 0))
        picture.save(path)
    run(PICTURES, "recipes.md")
    (tmp_path / "config.yaml").write_text(OF_PICTURES)
    cfg = get_cfg()
    cfg.merge_from_file("config.yaml")

    for part, name, labels, places in [
        ("TRAIN", cfg.INPUT.TRAIN_TRANSFORM, [0, 1], {0, 31}),
        ("TEST", cfg.INPUT.TEST_TRANSFORM, [1], {0}),
    ]:
        samples, transform = (
            DatasetCatalog.get(cfg.DATASETS[part][0]),
            TRANSFORM_REGISTRY.get(name)(cfg),
        )
        assert [sample["label"] for sample in samples] == labels
        seen = [transform(samples[-1]) for _ in range(20)]
        assert {(sample["x"].shape, sample["label"]) for sample in seen} == {((3, 32, 32), 1)}
        assert {sample["x"][0].argmax().item() for sample in seen} == places


def test_the_settings_of_the_table_are_accepted():
    table = page("docs/recipes.md").partition("| you want | write |\n")[2].partition("\n\n")[0]
    settings = re.findall(r"\| `([A-Z]\S+ .+)`(?:; .+)? \|$", table, re.MULTILINE)
    assert len(settings) == 10
    for setting in settings:
        cfg = get_cfg()
        cfg.merge_from_list(["SOLVER.WARMUP_ITERS", 0, *shlex.split(setting)])
        check_values(cfg)
        assert cfg != get_cfg()


def test_a_part_is_frozen_for_three_epochs(tmp_path):
    cfg = tiny_cfg(tmp_path, "SOLVER.MAX_ITER", "4ep")
    # two layers: a linear one, and a batch norm
    text = FROZEN.replace('"backbone.*"', '"layers.0.*", "layers.1.*"')
    cfg.merge_from_other_cfg(CfgNode(CfgNode._load_cfg_from_yaml_str(text)))
    trainer = DefaultTrainer(cfg)
    seen = []
    linear, norm = trainer.model.layers[:2]

    def keep(trainer):
        seen.append([each.clone() for each in (linear.weight, norm.weight, norm.running_mean)])

    trainer.register_hooks([hooks.CallbackHook(after_step=keep)])
    trainer.train()
    same = [[torch.equal(a, b) for a, b in zip(seen[0], each, strict=True)] for each in seen]
    frozen, trained = [True, True, False], [False, False, False]
    assert same == [[True, True, True]] + 14 * [frozen] + 5 * [trained]


def test_a_student_learns_from_a_teacher_that_stays_as_it_is():
    make = run(TEACHER, "recipes.md")["Distilled"]
    teacher = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    before = copy.deepcopy(teacher.state_dict())
    model = make(nn.Linear(4, 2), teacher)
    batch = {"x": torch.randn(16, 4), "label": torch.arange(16) % 2}
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
    trainer = SimpleTrainer(model, [batch], optimizer)
    trainer.train(0, 200)
    losses = [loss for loss, _ in trainer.storage.history("loss_teacher").values()]
    assert losses[-1] < losses[0]
    for name, value in before.items():
        assert torch.equal(teacher.state_dict()[name], value)

    scores = model.student(batch["x"]).double() / 4
    target = teacher(batch["x"]).double() / 4
    p, q = target.softmax(1), scores.softmax(1)
    kl = (p * (p / q).log()).sum() / 16
    assert model(batch)["loss_teacher"].item() == pytest.approx(16 * kl.item(), rel=1e-3)
    assert model.eval()(batch).shape == (16, 2)


def test_the_weight_of_a_loss_grows_with_the_iteration():
    model = run(GROWING, "recipes.md")["Net"]()
    batch = {"x": torch.randn(16, 4), "label": torch.arange(16) % 2}
    trainer = SimpleTrainer(model, [batch], torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train(500, 502)
    assert trainer.storage.history("weight_of_size").values() == [(0.5, 500), (0.501, 501)]
    assert trainer.storage.history("loss_size").values()[0][0] > 0


def test_mixed_batches_have_shares_of_labels_and_are_the_same_again(tmp_path):
    make = run(MIXUP, "recipes.md")["Trainer"].build_train_loader
    cfg = tiny_cfg(tmp_path, "SEED", 0, "INPUT.TRAIN_TRANSFORM", "")
    batch = next(iter(make(cfg)))
    assert batch["label"].shape == (8, 2)
    assert torch.allclose(batch["label"].sum(dim=1), torch.ones(8))
    samples = torch.stack([sample["x"] for sample in DatasetCatalog.get("tiny_train")])
    nearest = torch.cdist(batch["x"], samples).min(dim=1).values
    assert nearest.max() > 0  # none of the samples themselves
    again = next(iter(make(cfg)))
    assert torch.equal(again["x"], batch["x"])


def test_each_batch_of_an_evaluation_is_drawn(tmp_path):
    pytest.importorskip("PIL.Image")
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "TEST.EVAL_PERIOD", 0))
    trainer.register_hooks([run(DRAWN, "recipes.md")["hook"]])
    trainer.train()
    files = list((tmp_path / "visualization").glob("*/*.png"))
    assert len(files) == 3  # batches of 4 of 12 samples


@pytest.mark.usefixtures("catalogs")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 2), (2, 0), (2, 2)])
def test_ranks_and_workers_divide_the_lines_of_a_stream(
    num_ranks, num_workers, tmp_path, monkeypatch, as_rank
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("0\n1\n2\n3\n4\n5\n6\n")
    run(STREAM, "recipes.md")
    found = []
    for rank in range(num_ranks):
        as_rank(rank, num_ranks)
        stream = DatasetCatalog.get("lines_train")
        as_rank(0, 1)  # as in a worker that is started anew
        found += [
            int(sample["text"]) for sample in DataLoader(stream, None, num_workers=num_workers)
        ]
    assert sorted(found) == [*range(7)]


def test_lora_starts_as_the_base_model_and_trains_little_and_counts_in_eval_mode(monkeypatch):
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", True)
    base = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True, dtype=torch.bfloat16)
    model, x = (
        run(LORA, "recipes.md")["add_lora"](copy.deepcopy(base), rank=2),
        torch.randn(3, 4, 8).bfloat16(),
    )
    assert model.load_state_dict(base.state_dict(), strict=False).unexpected_keys == []
    assert torch.equal(model(x), base(x))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert [*map(torch.numel, trained)] == [2 * 8, 2 * 16, 2 * 16, 2 * 8]
    nn.init.ones_(model.linear2.up)
    with torch.no_grad():
        assert not torch.equal(model(x), base(x))
        assert torch.equal(model.eval()(x), model.train()(x))


@pytest.mark.usefixtures("catalogs")
def test_folds_give_a_mean_and_a_deviation_of_what_the_runs_evaluate(tmp_path):
    k_folds = run(FOLDS, "recipes.md")["k_folds"]
    cfg = tiny_cfg(tmp_path, "SOLVER.MAX_ITER", 3, "HOOKS", [{"NAME": "EMAHook", "DECAY": 0.5}])
    for _ in range(2):
        found = k_folds(cfg, DatasetCatalog.get("tiny_train"), 2, "classification/top1")
    lines = [
        (tmp_path / name / "metrics.json").read_text().splitlines() for name in ("fold0", "fold1")
    ]
    written = [json.loads(last)["classification/top1"] for *_, last in lines]
    assert found == (statistics.mean(written), statistics.stdev(written))
    # those of the second call alone
    assert [json.loads(line)["iteration"] for line in lines[0]] == [
        1,
        2,
        3,
    ]


def test_a_simple_trainer_logs_saves_and_resumes(tmp_path):
    train = run(SIMPLE, "recipes.md")["train"]
    whole = train(str(tmp_path / "whole"), 120)
    train(str(tmp_path / "halves"), 50)
    halves = train(str(tmp_path / "halves"), 120)
    assert halves.start_iter == 50
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, halves.model.state_dict()[name])
    assert {"log.txt", "metrics.json", "last_checkpoint"} <= {
        path.name for path in (tmp_path / "whole").iterdir()
    }


@pytest.mark.slow
def test_metrics_of_torchmetrics_are_an_evaluator():
    need("torchmetrics")
    evaluator = run(METRICS, "recipes.md")["Trainer"].build_evaluator(None, "")
    model = nn.Linear(2, 2)
    model.forward = lambda batch: batch["x"]
    batches = [
        {"x": torch.eye(10)[:2], "label": torch.tensor(labels)} for labels in ([0, 1], [0, 0])
    ]
    f1 = (4 / 5 + 2 / 3) / 2  # the mean over the two classes that there are
    assert inference_on_dataset(model, batches, evaluator) == {"metrics": {"f1": pytest.approx(f1)}}


@pytest.mark.parametrize(("num_ranks", "steps"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_each_token_has_the_same_weight_on_any_number_of_ranks_and_steps(num_ranks, steps, as_rank):
    logits, targets = torch.randn(4, 6, 10, requires_grad=True), torch.randint(10, (4, 6))
    targets[0, 2:] = -100
    tokens = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    expected = torch.autograd.grad(tokens.sum() / 4000, logits)[0]

    page = run(TOKENS.replace("ACCUMULATION_STEPS = 4", f"ACCUMULATION_STEPS = {steps}"), "page")
    as_rank(0, num_ranks)
    num_parts = num_ranks * steps
    sizes = {1: [4], 2: [1, 3], 4: [1, 1, 1, 1]}[num_parts]
    # the trainer and DDP average over the micro-batches of all ranks
    mean = sum(
        page["token_loss"](part, target) / num_parts
        for part, target in zip(logits.split(sizes), targets.split(sizes), strict=True)
    )
    assert torch.allclose(torch.autograd.grad(mean, logits)[0], expected)


def rates(*options):
    """The learning rate of each of the iterations."""
    cfg = get_cfg()
    cfg.merge_from_other_cfg(CfgNode(yaml.safe_load(DECAY)))
    cfg.merge_from_list([*options])
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=cfg.SOLVER.BASE_LR)
    scheduler = build_lr_scheduler(cfg, optimizer)
    for _ in range(cfg.SOLVER.MAX_ITER):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()


def test_the_rate_rises_to_the_base_and_falls_on_a_line():
    rising = [0.001 * i / 100 for i in range(100)]
    falling = [0.001 * (1000 - i) / 900 for i in range(100, 1000)]
    assert [*rates()] == pytest.approx(rising + falling, rel=1e-12, abs=1e-15)

    text = page("docs/recipes.md")
    (iterations, shown) = re.findall(r"^\| (?:iteration|rate) \| (.+) \|$", text, re.MULTILINE)
    found = [*rates()]
    for iteration, rate in zip(iterations.split(" | "), shown.split(" | "), strict=True):
        assert float(f"{found[int(iteration)]:.2g}") == float(rate)

    cosine = [*rates("SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR")]
    half = [0.0005 * (1 + math.cos(math.pi * (i - 100) / 900)) for i in range(100, 1000)]
    assert cosine == pytest.approx(rising + half, rel=1e-12, abs=1e-15)
    assert [*rates("SOLVER.RESCALE_INTERVAL", False)][100] == pytest.approx(0.0009)
