"""What the pages show does what they say."""

import ast
import inspect
import json
import logging
import re
import shlex
import textwrap
from argparse import Namespace

import pytest
import torch
import yaml
from torch import nn

from tests.docs.pages import blocks, contents, page, run
from tests.engine.job import TinyClassifier, tiny_cfg
from tests.engine.tiny import Weight, sgd
from trainkit.checkpoint import Checkpointer
from trainkit.checkpoint.differences import differing_files
from trainkit.config import CfgNode, ConfigError, check_values, get_cfg
from trainkit.data import (
    DatasetCatalog,
    MetadataCatalog,
    TrainingSampler,
    build_batch_data_loader,
    build_test_loader,
    build_train_loader,
)
from trainkit.engine import (
    AMPTrainer,
    DefaultTrainer,
    GraphTrainer,
    HookBase,
    SimpleTrainer,
    TrainerBase,
    default_argument_parser,
    default_setup,
    hooks,
)
from trainkit.engine.hook_base import HOOK_POINTS
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils import events
from trainkit.utils.plugins import find_plugins, lent_names


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def merged(text, cfg=None):
    cfg = get_cfg() if cfg is None else cfg
    cfg.merge_from_other_cfg(CfgNode(CfgNode._load_cfg_from_yaml_str(text)))
    return cfg


NORM, CHECK, OUTPUTS, COUNT = blocks("docs/hooks.md", "python")
(ENTRIES,) = blocks("docs/hooks.md", "yaml")
USE, COMMAND = blocks("docs/hooks.md", "sh")
IN_SHORT, COUNTER, WITHOUT_CONFIG, TRAIN, ITERATION = blocks("docs/training_loop.md", "python")
UNNAMED, DATASET, PARTS, PADDING, WEIGHTED, CURRICULUM, LOADER = blocks("docs/data.md", "python")
(COMBINED,) = blocks("projects/samplers/README.md", "python")
(NUMBERS,) = blocks("docs/data.md", "yaml")
FULL, SHORTENED = blocks("docs/migrate_from_detectron2.md", "python")
BEFORE, AFTER, EVALUATED = blocks("docs/migrate_from_plain_loop.md", "python")


def test_the_hook_of_a_config_ends_a_run_whose_loss_is_not_finite(tmp_path, monkeypatch):
    (tmp_path / "my_hooks.py").write_text(CHECK)
    monkeypatch.syspath_prepend(tmp_path)
    cfg = merged(ENTRIES, tiny_cfg(tmp_path, "SOLVER.NON_FINITE.POLICY", "ignore"))
    by_command = get_cfg()
    by_command.merge_from_list(shlex.split(COMMAND)[2:])
    assert (by_command.IMPORTS, by_command.HOOKS) == (cfg.IMPORTS, cfg.HOOKS)
    default_setup(cfg, Namespace())
    trainer = DefaultTrainer(cfg)
    names = [
        name
        for hook in trainer.hooks
        if (name := type(hook).__name__) not in find_plugins().run_hooks
    ]
    assert "BestCheckpointer" not in names
    assert names[:2] == ["IterationTimer", "CheckInvalidLoss"]  # moved by its priority

    class Spoil(HookBase):
        def after_step(self):
            self.trainer.model.layers[0].weight.data[0, 0] = torch.nan

    trainer.register_hooks([Spoil(), run(NORM, "hooks.md")["LogWeightNorm"](period=4)])
    with pytest.raises(FloatingPointError, match="loss_cls is nan in iteration 9"):
        trainer.train()
    assert [iter for _, iter in trainer.storage.history("weight_norm").values()] == [3, 7]


def test_the_hooks_of_the_first_command_average_and_store_the_rate_of_each_group(tmp_path):
    options = shlex.split(USE)[2:]
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "SOLVER.BIAS_LR_FACTOR", 2.0, *options))
    trainer.train()
    rates = {
        name: history.values()[0][0]
        for name, history in trainer.storage.histories().items()
        if name.startswith("lr/")
    }
    assert max(rates.values()) == pytest.approx(2 * min(rates.values()))
    assert len(rates) == len(trainer.optimizer.param_groups) > 1
    assert "EMAHook" in {type(hook).__name__ for hook in trainer.hooks}


def test_the_hook_of_the_page_stores_the_accuracy_of_training_batches_from_the_outputs():
    page = run(OUTPUTS, "hooks.md")
    batches = [{"x": torch.randn(8, 4), "label": torch.tensor([0, 1] * 4)} for _ in range(3)]
    model = page["Classifier"]()
    trainer = SimpleTrainer(model, batches, torch.optim.SGD(model.parameters(), lr=0.0))
    trainer.register_hooks([page["LogTrainAccuracy"](period=2)])
    trainer.train(0, 2)
    with torch.no_grad():
        right = model(batches[1])["outputs"].argmax(dim=1) == batches[1]["label"]
    assert trainer.storage.history("train_top1").values() == [
        (100 * right.float().mean().item(), 1)
    ]


def test_the_tables_have_every_point_and_every_hook_with_a_line_that_is_understood():
    text = page("docs/hooks.md")
    points = re.findall(
        r"^\| (`.+?`) \|",
        text.partition("## Points")[2].partition("## The save point")[0],
        re.MULTILINE,
    )
    assert sorted(name for row in points for name in re.findall(r"`(\w+)", row)) == sorted(
        HOOK_POINTS
    )

    rows = dict(
        re.findall(r"^\| `(\w+)` \| .+? \| (.+) \|$", text.partition("## Points")[0], re.MULTILINE)
    )
    public = {
        name: getattr(hooks, name)
        for name in [*hooks.__all__, *lent_names("trainkit.engine.hooks")]
    }
    classes = {
        name
        for name, value in public.items()
        if inspect.isclass(value) and issubclass(value, HookBase)
    }
    assert rows.keys() == classes - {"HookBase"}
    for name, config in rows.items():
        [line] = re.findall("`(.+)`", config)
        if config.startswith("in Python"):
            assert line.startswith(f"{name}(")
            continue
        [(key, value)] = [
            *({"HOOKS": [entry]} if "NAME" in (entry := yaml.safe_load(line)) else entry).items()
        ]
        get_cfg().merge_from_list([key, value])
        if key == "HOOKS":
            assert value[0].pop("NAME") == name
            assert {each.lower() for each in value[0]} <= {
                *inspect.signature(public[name]).parameters
            }, line


def test_the_state_of_a_hook_survives_and_the_summary_tells_it(tmp_path, caplog):
    hook_class = run(COUNT, "hooks.md")["CountSamples"]
    for max_iter, summary in ((4, "32 samples were used"), (6, "48 samples were used")):
        trainer = DefaultTrainer(tiny_cfg(tmp_path, "SOLVER.MAX_ITER", max_iter))
        trainer.register_hooks([hook_class()])
        trainer.resume_or_load(resume=True)
        with caplog.at_level(logging.INFO):
            trainer.train()
        assert f"\n  {summary}\n" in caplog.messages[-1]


def code_of(function):
    """The lines of a function without its docstring."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    first = ast.parse("\n".join(lines)).body[0].body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return lines[: first.lineno - 1] + lines[first.end_lineno :] if has_docstring else lines


def test_the_loop_is_that_of_the_source():
    assert TRAIN.splitlines() == code_of(TrainerBase.train)
    parts = (
        TrainerBase._run_iterations,
        TrainerBase._begin_iteration,
        TrainerBase._save_point,
        TrainerBase._boundary,
        TrainerBase._call_once,
        TrainerBase._should_end,
    )
    assert "\n\n\n".join("\n".join(code_of(part)) for part in parts) + "\n" == ITERATION

    lines, short = [
        [line.partition("  #")[0] for line in code.splitlines()]
        for code in (blocks("README.md", "python")[0], IN_SHORT)
    ]
    assert short == lines


def test_the_trainer_without_a_config_learns_and_writes(tmp_path, capsys):
    trainer = run(WITHOUT_CONFIG, "training_loop.md")["trainer"]
    assert (trainer.status, trainer.iter) == ("finished", 100)
    assert trainer.storage.history("total_loss").latest() < 0.01
    assert len((tmp_path / "metrics.json").read_text().splitlines()) == 10
    assert capsys.readouterr().out.startswith("finished ")
    counter = run(COUNTER, "training_loop.md")["counter"]
    assert counter.storage.history("square").values() == [(0, 0), (1, 1), (4, 2), (9, 3)]
    assert (counter.status, counter.iter) == ("stopped", 4)


def test_a_setting_of_the_table_does_what_its_argument_does(tmp_path):
    table = page("docs/training_loop.md").partition(
        "`SimpleTrainer`: an argument |\n|---|---|---|\n"
    )
    rows = [re.findall("`(.+?)`", line) for line in table[2].partition("\n\n")[0].splitlines()]
    model, data_loader = Weight(), [torch.tensor(1.0)] * 5
    names = {"model": model, "data_loader": data_loader, "optimizer": sgd(model, lr=0.5)}
    names |= {"AMPTrainer": AMPTrainer, "torch": torch}
    names |= {"SimpleTrainer": SimpleTrainer, "clip_grad_norm_": torch.nn.utils.clip_grad_norm_}

    def by_config(setting):
        torch.manual_seed(0)
        trainer = DefaultTrainer(tiny_cfg(tmp_path, "SEED", 0, *shlex.split(setting)))
        trainer.train()
        return trainer

    def by_argument(argument):
        trainer = eval(f"SimpleTrainer(model, data_loader, optimizer, {argument})", names)
        trainer.train(0, 1)
        return trainer

    (clipping, clips), (accumulates, steps), (in_bf16, amp), (epochs, lasts) = rows
    assert len(by_config(clipping).storage.history("grad_norm").values()) == 10
    assert len(by_argument(clips).storage.history("grad_norm").values()) == 1
    assert by_config(accumulates).epoch_length == by_argument(steps).epoch_length == 5 / 4
    half, whole = by_config(in_bf16), by_config("SEED 0")
    losses = [trainer.storage.history("total_loss").values() for trainer in (half, whole)]
    assert losses[0] != losses[1] == by_config("SEED 0").storage.history("total_loss").values()
    assert eval(amp, names).precision == torch.bfloat16
    assert by_config(epochs).max_iter == 20 * 5
    trainer = SimpleTrainer(model, data_loader, sgd(model, lr=0.5))
    eval(lasts, {"trainer": trainer})
    assert trainer.max_iter == 20 * 5


def test_the_dataset_of_the_page_is_transformed_and_batched():
    run(DATASET, "data.md")
    cfg = merged(NUMBERS)
    cfg.merge_from_list(["SEED", 0, "DATALOADER.NUM_WORKERS", 0])
    assert MetadataCatalog.get("numbers_train").class_names == ["even", "odd"]
    batch = next(iter(build_train_loader(cfg)))
    assert list(batch["x"].shape) == [10, 7]
    assert torch.equal(batch["x"][:, 0].long(), batch["label"])


def test_the_trainer_of_the_page_gives_its_datasets_without_a_name(tmp_path):
    trainer = run(UNNAMED, "data.md")["Trainer"]
    cfg = tiny_cfg(tmp_path, "SOLVER.IMS_PER_BATCH", 100)
    for node in ("TRAIN_TRANSFORM", "TEST_TRANSFORM"):
        cfg.INPUT[node] = ""
    assert sorted(next(iter(trainer.build_train_loader(cfg)))["x"].tolist()) == [*range(100)]
    batches = [batch["x"].tolist() for batch in trainer.build_test_loader(cfg, "")]
    assert batches == [[*range(start, start + 4)] for start in range(100, 120, 4)]


@pytest.mark.usefixtures("catalogs")
def test_the_two_parts_of_the_page_have_each_sample_once():
    run(PARTS, "data.md")
    parts = [DatasetCatalog.get(name) for name in ("mine_val", "mine_train")]
    assert [len(part) for part in parts] == [10, 90]
    assert sorted(sample["x"] for part in parts for sample in part) == [*range(100)]


def test_the_texts_of_the_page_are_padded_to_the_longest_of_their_batch(tmp_path):
    cfg = tiny_cfg(tmp_path, "INPUT.TRAIN_TRANSFORM", "")
    batch = next(iter(run(PADDING, "data.md")["Trainer"].build_train_loader(cfg)))
    lengths = batch["tokens"].sum(dim=1)
    assert batch["tokens"].shape == (8, lengths.max())
    assert torch.equal(batch["label"], lengths % 2)


def test_the_sampler_of_the_page_draws_rare_samples_as_often_and_resumes(tmp_path):
    names = run(WEIGHTED, "data.md")
    batches = iter(names["loader"])
    labels = torch.cat([next(batches)["label"] for _ in range(200)]).float()
    assert labels.mean().item() == pytest.approx(0.5, abs=0.05)  # 5 of weight 19, 95 of weight 1
    state, following = names["loader"].state_dict(), next(batches)
    fresh = run(WEIGHTED, "data.md")["loader"]
    fresh.load_state_dict(state)
    assert torch.equal(next(iter(fresh))["x"], following["x"])
    cfg = tiny_cfg(tmp_path, "INPUT.TRAIN_TRANSFORM", "")
    loader = build_train_loader(cfg, dataset=names["samples"], sampler=names["sampler"])
    assert len(next(iter(loader))["x"]) == 8


def test_the_dataset_of_the_page_learns_its_epoch_in_a_worker():
    dataset = run(CURRICULUM, "data.md")["Curriculum"]([10, 20])
    batches = iter(build_train_loader(dataset, total_batch_size=2, num_workers=1))
    noise = [next(batches)["noise"].tolist() for _ in range(3)]
    assert noise == [[1, 1], [1 / 2, 1 / 2], [1 / 3, 1 / 3]]


@pytest.mark.parametrize("code", [LOADER, COMBINED])
def test_the_loaders_of_the_page_can_be_resumed(code):
    loader, other, fresh = (run(code, "data.md")["loader"] for _ in range(3))
    batches = iter(loader)
    first = next(batches)
    state, second = loader.state_dict(), next(batches)
    other.load_state_dict(state)
    assert (next(iter(other)), next(iter(fresh))) == (second, first)
    assert first != second
    sizes = len(first) if code == LOADER else {name: len(batch) for name, batch in first.items()}
    assert sizes == (4 if code == LOADER else {"photos": 4, "drawings": 2})


OPTIONS = [
    "SOLVER.MAX_ITER",
    "40",
    "SOLVER.BASE_LR",
    "0.05",
    "SOLVER.WARMUP_ITERS",
    "5",
    "SOLVER.STEPS",
    "()",
]
OPTIONS += ["TEST.EVAL_PERIOD", "20", "DATALOADER.NUM_WORKERS", "0"]


def replaced(source):
    """By the command of the page."""
    [command] = re.findall(
        r"^sed -i '(.+)' train_net.py$", page("docs/migrate_from_detectron2.md"), re.M
    )
    for old, new in re.findall(r"s/(\w+)/(\w+)/", command):
        source = "\n".join(line.replace(old, new, 1) for line in source.split("\n"))
    return source


@pytest.mark.parametrize("block", [0, 1])
def test_a_script_for_detectron2_runs_by_its_imports_and_so_does_what_is_left_of_it(
    block, tmp_path
):
    source = (FULL, SHORTENED)[block]
    if block == 0:
        source = replaced(source)
    main = run(source, "migrate_from_detectron2.md")["main"]
    command = [*OPTIONS, "OUTPUT_DIR", str(tmp_path)]
    assert main(default_argument_parser().parse_args(command))["line"]["error"] < 0.2
    assert {"model_best.pth", "model_final.pth", "metrics.json"} <= {
        path.name for path in tmp_path.iterdir()
    }
    before = contents(tmp_path)
    # in detectron2, of the last checkpoint
    evaluate = ["--eval-only", "--resume"] if block == 0 else ["--eval-only"]
    assert main(default_argument_parser().parse_args([*evaluate, *command]))["line"]["error"] < 0.2
    trial = default_argument_parser().parse_args(["--fast-dev-run", *command])
    main(trial)
    assert (tmp_path / "fast_dev_run").exists()
    assert contents(tmp_path) == before


def test_what_the_first_table_says_of_batches_configs_and_the_last_file(tmp_path):
    for collate, kind in (("default", dict), ("list", list)):
        cfg = tiny_cfg(tmp_path, "DATALOADER.COLLATE", collate)
        loaders = (build_train_loader(cfg), build_test_loader(cfg, "tiny_test"))
        assert [type(next(iter(loader))) for loader in loaders] == [kind, kind]

    (tmp_path / "base.yaml").write_text("SOLVER: {BASE_LR: 0.25}")
    (tmp_path / "of_detectron2.yaml").write_text(
        "_BASE_: base.yaml\nVERSION: 2\nINPUT: {FORMAT: BGR, MIN_SIZE_TRAIN: [640]}\n"
        "MODEL: {META_ARCHITECTURE: GeneralizedRCNN, BACKBONE: {NAME: a}}"
    )
    cfg = get_cfg()
    cfg.merge_from_file(str(tmp_path / "of_detectron2.yaml"))
    assert (cfg.SOLVER.BASE_LR, cfg.MODEL.BACKBONE.NAME, cfg.INPUT.FORMAT) == (0.25, "a", "BGR")
    (tmp_path / "aug.yaml").write_text("TEST: {AUG: {ENABLED: True}}")
    (tmp_path / "eval.yaml").write_text("OUTPUT_DIR: !!python/object/apply:eval ['1']")
    for name, message in (("aug", "unknown key TEST.AUG.ENABLED"), ("eval", "eval")):
        with pytest.raises(ConfigError, match=message):
            get_cfg().merge_from_file(str(tmp_path / f"{name}.yaml"))

    DefaultTrainer(tiny_cfg(tmp_path / "run", "SOLVER.CHECKPOINT_PERIOD", 5)).train()
    names = sorted(path.name for path in (tmp_path / "run").glob("*.pth"))
    assert names == ["model_0000004.pth", "model_final.pth"]


def test_a_run_of_detectron2_goes_on_with_its_weights_and_momentum(tmp_path):
    """Its files as `DefaultTrainer` and `PeriodicCheckpointer` of detectron2 write them."""
    names = run(replaced(FULL), "migrate_from_detectron2.md")
    model = names["Line"]()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    model.linear(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    schedule = {"base_lrs": [0.05], "last_epoch": 10, "_last_lr": [0.05]}
    trainer = {
        "iteration": 9,
        "hooks": {"LRScheduler": schedule},
        "_trainer": {"iteration": 9, "optimizer": optimizer.state_dict()},
    }
    state = {"model": model.state_dict(), "trainer": trainer, "iteration": 9}
    torch.save(state, tmp_path / "model_0000009.pth")
    (tmp_path / "last_checkpoint").write_text("model_0000009.pth")

    seen = []

    class Trainer(names["Trainer"]):
        def before_train(self):
            super().before_train()
            momentum = self.optimizer.state_dict()["state"][0]["momentum_buffer"].item()
            seen.append((self.start_iter, self.model.linear.weight.item(), momentum))

    names["Trainer"] = Trainer
    command = ["--resume", *OPTIONS, "OUTPUT_DIR", str(tmp_path)]
    names["main"](default_argument_parser().parse_args(command))
    buffer = optimizer.state_dict()["state"][0]["momentum_buffer"].item()
    assert seen == [(10, model.linear.weight.item(), buffer)]
    assert "The data start again" in (tmp_path / "log.txt").read_text()


def test_the_plain_loop_and_the_trainer_have_the_same_losses(tmp_path, capsys):
    names = run(BEFORE + AFTER, "migrate_from_plain_loop.md")
    losses = names["train"](3)
    assert capsys.readouterr().out.splitlines()[-1] == f"epoch 2: loss {losses[-1]:.4f}"
    assert names["train_with_trainkit"](3, str(tmp_path)) == losses
    assert (tmp_path / "log.txt").exists()
    again = names["train_with_trainkit"](4, str(tmp_path))  # continues
    assert (len(again), again[:60]) == (80, losses)
    clipped = BEFORE.replace(
        "clip_grad_norm_(net.parameters(), 1.0)", "clip_grad_norm_(net.parameters(), 2.0)"
    )
    assert run(clipped, "migrate_from_plain_loop.md")["train"](3) != losses


def test_the_lines_of_the_table_do_what_those_of_a_loop_do():
    """A schedule that a loop steps after each epoch; four batches for an update; the device."""
    names = run(BEFORE + AFTER, "migrate_from_plain_loop.md")
    mse_loss, losses_from = torch.nn.functional.mse_loss, names["losses_from"]
    net, loader = names["make_net"](), names["make_loader"]()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 * len(loader))
    trainer = SimpleTrainer(losses_from(net, mse_loss), loader, optimizer, accumulation_steps=1)
    trainer.register_hooks([hooks.LRScheduler(optimizer, scheduler)])
    trainer.train(0, 3 * len(loader))
    rates = [rate for rate, _ in trainer.storage.history("lr").values()]
    assert rates == pytest.approx([0.1] * 40 + [0.01] * 20)

    weights = []
    for is_loop in (True, False):
        net, loader = names["make_net"](), names["make_loader"]()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        if is_loop:
            for i, (x, y) in enumerate(loader):
                (mse_loss(net(x), y) / 4).backward()
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
        else:
            model = losses_from(net, mse_loss)
            SimpleTrainer(model, loader, optimizer, accumulation_steps=4).train(0, 5)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in net.parameters()]))
    assert torch.allclose(*weights)

    net, loader = names["make_net"](), names["make_loader"]()
    model = losses_from(net, mse_loss)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    AMPTrainer(model, loader, optimizer, precision=torch.bfloat16).train(0, 2)
    trainer = SimpleTrainer(model.to("meta"), loader, optimizer)
    assert [tensor.device.type for tensor in trainer.fetch()] == ["meta", "meta"]


def test_the_script_evaluates_keeps_the_best_weights_and_stops_early(tmp_path):
    names = run(BEFORE + AFTER + EVALUATED, "migrate_from_plain_loop.md")
    model, trainer = names["train_and_evaluate"](500, str(tmp_path))
    errors = [value for value, _ in trainer.storage.history("val_error").values()]
    best = min(errors)
    assert errors.index(best) == len(errors) - 1 - 3
    assert trainer.iter == 20 * len(errors) < 500 * 20
    assert (tmp_path / "model_final.pth").exists()
    model.eval()
    with torch.no_grad():
        of_best = [
            (model([x, y]) - y).square().mean().item() for x, y in [*names["make_loader"]()][:5]
        ]
    assert sum(of_best) / 5 == pytest.approx(best, rel=1e-6)


(USUAL,) = blocks("docs/config.md", "yaml")


def test_the_usual_settings_train_with_the_rates_that_they_name(tmp_path, monkeypatch):
    monkeypatch.setattr(MODEL_REGISTRY, "_objects", {**MODEL_REGISTRY._objects})

    @MODEL_REGISTRY.register()
    class MyModel(TinyClassifier):
        def __init__(self, cfg):
            super().__init__(cfg)
            assert cfg.MODEL.WIDTH == 64
            self.backbone = torch.nn.Linear(4, 4)

        def forward(self, batch):
            return super().forward({**batch, "x": self.backbone(batch["x"])})

    cfg = merged(USUAL, tiny_cfg(tmp_path))
    cfg.merge_from_list(["OUTPUT_DIR", str(tmp_path), "SOLVER.IMS_PER_BATCH", 2])
    trainer = DefaultTrainer(cfg)
    found = {}
    for group in trainer.optimizer.param_groups:
        for name, parameter in trainer.model.named_parameters():
            if any(parameter is each for each in group["params"]):
                found[name] = (group["initial_lr"], group["weight_decay"], group["betas"])
    assert found["backbone.weight"] == (pytest.approx(0.0001), 0.05, (0.9, 0.98))
    assert found["layers.0.weight"] == (0.001, 0.05, (0.9, 0.98))
    assert found["layers.0.bias"] == (0.001, 0, (0.9, 0.98))

    trainer.train()
    assert trainer.max_iter == 20 * 40 / (2 * 4)
    rates = [rate for rate, _ in trainer.storage.history("lr").values()]
    assert rates.index(max(rates)) == pytest.approx(5, abs=1)  # the warm-up has one epoch
    assert len(trainer.storage.history("grad_norm").values()) == trainer.max_iter


THREADS, GARBAGE = blocks("docs/performance.md", "yaml")
EAGER, GRAPH = blocks("projects/graph/README.md", "yaml")
(STORE_NORM,) = blocks("docs/performance.md", "python")
(TRAINERS,) = blocks("projects/graph/README.md", "python")


def test_every_yaml_block_is_a_config_and_the_hook_stores_what_each_iteration_had():
    for text in (THREADS, GARBAGE, EAGER, GRAPH):
        merged(text)
    names, model = run(STORE_NORM, "performance.md"), Weight()
    trainer = SimpleTrainer(
        model, [torch.tensor(1.0)], sgd(model, lr=0.25), async_write_metrics=True
    )
    trainer.register_hooks([names["StoreNorm"]()])
    trainer.train(0, 3)
    assert trainer.storage.history("norm").values() == [(0.75, 0), (0.5, 1), (0.25, 2)]


def test_the_settings_of_the_first_table_are_accepted_and_three_steps_are_profiled(tmp_path):
    table = (
        page("docs/performance.md").partition("| what you see | try |\n")[2].partition("\n\n")[0]
    )
    settings = re.findall(r"`([A-Z][A-Z0-9_.]+ [^`]+)`", table)
    assert len(settings) == 11
    for setting in settings:
        cfg = get_cfg()
        cfg.merge_from_list([*shlex.split(setting), "SOLVER.WARMUP_ITERS", 0])
        check_values(cfg)
        assert cfg != get_cfg()
    profile = shlex.split(settings[-1].replace("100, 103", "4, 7"))
    DefaultTrainer(tiny_cfg(tmp_path, *profile)).train()
    traces = sorted(path.name.partition(".")[0] for path in (tmp_path / "profile").iterdir())
    assert traces == ["trace_iter0000004", "trace_iter0000005", "trace_iter0000006"]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_the_optimizers_of_the_page_are_fused(name):
    [names] = re.findall("uses the fused forms of (.+?) if", page("docs/performance.md"))
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.OPTIMIZER.NAME", name, "SOLVER.BASE_LR", 0.1])
    optimizer = DefaultTrainer.build_optimizer(cfg, torch.nn.Linear(2, 2))
    assert bool(optimizer.defaults["fused"]) == (name in re.findall(r"\w+", names))


@pytest.mark.slow
def test_both_trainers_of_the_script_train_the_same():
    losses = []
    for line in TRAINERS.splitlines():
        torch.manual_seed(0)
        names = {"SimpleTrainer": SimpleTrainer, "GraphTrainer": GraphTrainer, "torch": torch}
        trainer = run(line, "graph/README.md", model=Weight(), loader=[torch.tensor(1.0)], **names)[
            "trainer"
        ]
        trainer.train(0, 3)
        losses.append(trainer.storage.history("total_loss").values())
    assert losses[0] == losses[1]


PAGE = "docs/writers.md"
PUT, PER_EPOCH, WITH_PANDAS, WITH_TENSORBOARD, REGISTERED, OWN = blocks(PAGE, "python")
(CONFIG,) = blocks(PAGE, "yaml")


def test_a_writer_of_ones_own_writes_with_the_others_and_the_files_are_read(tmp_path):
    cfg = tiny_cfg("output/digits", "LOG.WRITERS", ["json", "csv", "tensorboard"])
    trainer = run(OWN, PAGE)["Trainer"](cfg)
    trainer.train()
    lines = (tmp_path / "output/digits/newest.txt").read_text().splitlines()
    latest = trainer.storage.latest_with_smoothing_hint(20)

    assert len(lines) == len(latest) > 5
    assert f"total_loss {latest['total_loss'][0]:.4g} (9)" in lines
    losses = run(WITH_TENSORBOARD, PAGE)["losses"]
    assert [*losses] == [1, 3, 4, 5, 7, 9]  # after the evaluation, too
    assert losses[9] == pytest.approx(latest["total_loss"][0])

    pytest.importorskip("pandas")
    names = run(WITH_PANDAS.replace("lines=True", "lines=True, precise_float=True"), PAGE)

    table, same = names["table"], names["same"]
    assert [*table.index] == [*same.index] == [1, 3, 4, 5, 7, 9, 10]
    assert set(same.columns) == set(table.columns)
    for name in ("total_loss", "classification/top1"):
        assert table[name].dropna().to_dict() == same[name].dropna().to_dict()


def test_what_the_hook_of_the_page_puts_is_written_and_the_console_leaves_one_value_out(
    tmp_path, caplog
):
    loads = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    cfg = tiny_cfg(tmp_path, "LOG.WRITERS", ["console", "json", "tensorboard"])
    cfg.merge_from_list(["LOG.PERIOD", 10])
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([run(PUT, PAGE)["LogInputs"]()])
    seen = []
    keep = hooks.CallbackHook(after_step=lambda trainer: seen.append(trainer.batch["x"].mean()))
    trainer.register_hooks([keep])
    with caplog.at_level(logging.INFO):
        trainer.train()
    [line] = [text for text in caplog.messages if "after 10/10  total" in text]
    assert "input_mean: " in line
    assert "batch_size" not in line

    tags = loads.EventAccumulator(str(tmp_path)).Reload().Tags()
    assert (tags["images"], tags["histograms"]) == (["input"], ["inputs"])
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    means = [line["input_mean"] for line in lines if "input_mean" in line]
    assert means[-1] == pytest.approx(((seen[4] + seen[9]) / 2).item())
    assert [line["batch_size"] for line in lines if "batch_size" in line] == [8] * len(means)


@pytest.mark.parametrize(("period", "written"), [("1ep", [4, 9, 14, 19]), (10, [4, 14, 19])])
def test_a_value_per_epoch_is_written_if_the_log_period_is_not_longer(tmp_path, period, written):
    options = ["SOLVER.MAX_ITER", 20, "TEST.EVAL_PERIOD", 0, "LOG.PERIOD", period]
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *options))
    trainer.register_hooks([run(PER_EPOCH, PAGE)["EpochLoss"]()])
    trainer.train()

    of_all = torch.tensor([loss for loss, _ in trainer.storage.history("total_loss").values()])
    means = of_all.double().reshape(4, 5).mean(dim=1)
    in_storage = {iter: value for value, iter in trainer.storage.history("epoch_loss").values()}
    assert in_storage == pytest.approx(dict(zip([4, 9, 14, 19], means.tolist(), strict=True)))

    lines = map(json.loads, (tmp_path / "metrics.json").read_text().splitlines())
    in_file = {line["iteration"]: line["epoch_loss"] for line in lines if "epoch_loss" in line}
    assert in_file == {iter: in_storage[iter] for iter in written}


def test_a_registered_writer_is_named_in_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr(events.WRITER_REGISTRY, "_objects", {})
    run(REGISTERED, PAGE)
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "LOG.WRITERS", ["NumberOfScalars"]))
    trainer.train()
    assert int((tmp_path / "number.txt").read_text()) == len(trainer.storage.latest())
    assert merged(CONFIG).LOG.PERIOD == 50

    got = []

    @events.WRITER_REGISTRY.register()
    class TakesTheConfig(events.EventWriter):
        def __init__(self, output_dir, window_size, cfg):
            got[:] = [str(output_dir), window_size, cfg.LOG.WRITERS]

    cfg = tiny_cfg(tmp_path, "LOG.WRITERS", ["TakesTheConfig"], "LOG.WINDOW", 7)
    DefaultTrainer(cfg)
    assert got == [str(tmp_path), 7, ["TakesTheConfig"]]


(OWN_LOOP,) = blocks("docs/exact_resume.md", "python")
OwnLoop = run(OWN_LOOP, "docs/exact_resume.md")["OwnLoop"]


class GANTrainer(OwnLoop):
    """Two models and two optimizers; each iteration updates one model after the other."""

    def __init__(self, models, data_loader):
        super().__init__(data_loader)
        self.models = models
        self.optimizers = {
            name: torch.optim.Adam(models[name].parameters(), 0.002) for name in models
        }

    def run_step(self):
        real = torch.stack(self.next_batch())
        fake = self.models["generator"](torch.randn(len(real), 4))
        judge = self.models["discriminator"]
        difference = (judge(fake.detach()) - judge(real)).mean()
        self.update("discriminator", difference + judge(real).square().mean())
        self.update("generator", -judge(fake).mean())

    def update(self, name, loss):
        self.optimizers[name].zero_grad()
        loss.backward()
        self.optimizers[name].step()
        self.storage.put_scalar(f"loss_{name}", loss.item())


def build_gan(folder):
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    judge = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    models = nn.ModuleDict({"generator": generator, "discriminator": judge})
    points = [torch.tensor([x / 50, (x / 50) ** 2]) for x in range(100)]
    sampler = TrainingSampler(len(points), seed=0)
    trainer = GANTrainer(models, build_batch_data_loader(points, sampler, 16, num_workers=1))
    checkpointer = Checkpointer(models, folder, trainer=trainer)
    trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, period=10)])
    return trainer, checkpointer


def train_gan(folder, max_iter):
    """Start, or continue from the last checkpoint in the folder."""
    trainer, checkpointer = build_gan(folder)
    checkpointer.resume_or_load("")
    trainer.train(trainer.next_iter, max_iter)
    return trainer


@pytest.mark.parametrize("left_out", ["", "rng", "data", "attributes"])
def test_a_gan_with_two_optimizers_resumes_exactly_and_the_check_names_what_was_not_resumed(
    tmp_path, left_out
):
    def kill(trainer):
        if trainer.iter == 24:
            raise SystemExit

    torch.manual_seed(1)
    train_gan(tmp_path / "whole", 40)
    torch.manual_seed(1)
    trainer, _ = build_gan(tmp_path / "pieces")
    trainer.register_hooks([hooks.CallbackHook(after_step=kill)])
    with pytest.raises(SystemExit):
        trainer.train(0, 40)
    torch.manual_seed(2)
    if not left_out:
        assert train_gan(tmp_path / "pieces", 40).start_iter == 20
    else:
        trainer, checkpointer = build_gan(tmp_path / "pieces")
        fresh = {left_out: trainer.state_dict()[left_out]}
        trainer.register_hooks(
            [hooks.CallbackHook(after_load=lambda _, state: state["trainer"].update(fresh))]
        )
        checkpointer.resume_or_load("")
        trainer.train(trainer.iter + 1, 40)

    files = [str(tmp_path / name / "model_final.pth") for name in ("whole", "pieces")]
    differences = list(differing_files(*files))
    if left_out:
        assert differences[0].startswith("model/")
    else:
        assert differences == []


def test_settings_and_the_command_are_in_the_files_of_a_run_and_the_environment_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("sys.argv", ["train.py", "OF_THE_COMMAND"])
    monkeypatch.setenv("MY_PASSWORD", "OF_THE_ENVIRONMENT")
    cfg = tiny_cfg(tmp_path / "run", "MODEL.TOKEN", "OF_A_SETTING")
    default_setup(cfg, Namespace())
    DefaultTrainer(cfg).train()

    texts = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    found = {
        word: {name for name, text in texts.items() if word.encode() in text}
        for word in ("OF_THE_COMMAND", "OF_A_SETTING", "OF_THE_ENVIRONMENT")
    }
    assert {"log.txt", "model_final.pth"} <= found["OF_THE_COMMAND"]
    assert {"log.txt", "config.yaml", "model_final.pth"} <= found["OF_A_SETTING"]
    assert found["OF_THE_ENVIRONMENT"] == set()


def test_a_resume_keeps_the_rate_and_the_decay_and_uses_a_new_period(tmp_path):
    DefaultTrainer(tiny_cfg(tmp_path, "SOLVER.MAX_ITER", 4)).train()
    options = ["SOLVER.BASE_LR", 0.003, "SOLVER.WEIGHT_DECAY", 0.3, "SOLVER.MOMENTUM", 0.3]
    cfg = tiny_cfg(tmp_path, "SOLVER.MAX_ITER", 8, "SOLVER.CHECKPOINT_PERIOD", 2, *options)
    former = tiny_cfg(tmp_path).SOLVER
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=True)
    group = trainer.optimizer.param_groups[0]
    kept = [group["initial_lr"], group["weight_decay"], group["momentum"]]
    assert kept == [former.BASE_LR, former.WEIGHT_DECAY, former.MOMENTUM]
    trainer.train()
    assert (tmp_path / "model_0000005.pth").exists()
