"""The examples of the page do what it says; `projects/remote` tests a run in its store."""

import ast
import copy
import gzip
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.capability_names import imported_projects
from tests.docs.pages import ROOT, blocks, run
from tests.docs.pages import page as page_text
from tests.engine.job import tiny_cfg
from tests.engine.tiny import Weight, sgd
from trainkit.checkpoint import Checkpointer, CheckpointError
from trainkit.config import ConfigError, check_values, prepare_projects
from trainkit.engine import (
    DefaultTrainer,
    SimpleTrainer,
    default_argument_parser,
    default_setup,
    hooks,
)
from trainkit.engine.defaults.build import POLICY_REGISTRY
from trainkit.engine.hook_base import HOOK_REGISTRY
from trainkit.engine.policies import NonFinitePolicy
from trainkit.utils import comm

ONE_STEP = ("SOLVER.MAX_ITER", 1, "SOLVER.WARMUP_ITERS", 0, "SOLVER.STEPS", ())
SOLVER, HOOK, STEP, POLICY, TWO, WRAPPER, FORMAT, STORE, LOADER, PLUG_IN, PAIRS, SCRIPT = blocks(
    "docs/extending.md", "python"
)
(COMMAND,) = blocks("docs/extending.md", "sh")
(ENTRY_POINT,) = blocks("docs/extending.md", "toml")


@pytest.fixture(scope="module")
def page():
    """What all blocks of parts define, each of which registers its part once."""
    return {
        name: value
        for block in (SOLVER, HOOK, STEP, POLICY, TWO, WRAPPER, FORMAT, LOADER)
        for name, value in run(block, "page").items()
    }


def test_the_hook_counts_on_after_a_resume(page, tmp_path):
    cfg = tiny_cfg(tmp_path, "HOOKS", "[{'NAME': 'CountSamples'}]", "SOLVER.CHECKPOINT_PERIOD", 4)
    trainer = DefaultTrainer(cfg)
    trainer.train(0, 4)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load()
    trainer.train()
    (hook,) = [hook for hook in trainer.hooks if isinstance(hook, page["CountSamples"])]
    assert hook.state_dict() == {"seen": cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.MAX_ITER}


def test_the_part_of_the_step_and_the_wrapper_are_chosen_by_the_config(page, tmp_path):
    gradients = {}
    for name in ("", "flooded"):
        torch.manual_seed(0)
        trainer = DefaultTrainer(tiny_cfg(tmp_path / name, "SOLVER.TRAINER", name, *ONE_STEP))
        assert type(trainer._trainer) is (page["Flooded"] if name else SimpleTrainer)
        trainer.train()
        gradients[name] = [parameter.grad for parameter in trainer.model.parameters()]
    # the loss is above 0.1, so its gradient is the same
    assert all(map(torch.equal, gradients[""], gradients["flooded"]))
    DefaultTrainer(tiny_cfg(tmp_path, "MODEL.PARALLEL", "half_gradients", *ONE_STEP)).train()
    assert (tmp_path / "model_final.pth").exists()


def test_the_policy_goes_on_after_a_loss_that_is_nan(page, tmp_path):
    cfg = tiny_cfg(tmp_path, "SOLVER.NON_FINITE.POLICY", "zero")
    policy = DefaultTrainer(cfg)._trainer.policy
    assert type(policy) is page["ZeroNonFinite"]

    weights = {}
    for name in (policy, "ignore"):
        model = Weight()
        batches = [torch.tensor(1.0), torch.tensor(torch.nan), torch.tensor(2.0)]
        trainer = SimpleTrainer(model, batches, sgd(model, lr=0.25), non_finite=name)
        trainer.train(0, 3)
        weights[name] = model.weight.item()
    # 1 - 0.25 * 1 - 0 - 0.25 * 2
    assert weights[policy] == 0.25
    assert math.isnan(weights["ignore"])


def test_a_policy_gets_the_losses_and_the_largest_number_in_a_row_and_its_text_ends_the_run(
    page, tmp_path, monkeypatch
):
    class Ends(NonFinitePolicy):
        def describe(self, iter, values):
            numbers = ", ".join(f"{name} is {values[name]}" for name in sorted(values))
            return f"{numbers}; {self.max_in_row} are accepted"

    monkeypatch.setattr(POLICY_REGISTRY, "_objects", {"ends": Ends})
    options = ["SOLVER.NON_FINITE.POLICY", "ends", "SOLVER.NON_FINITE.MAX_IN_ROW", 7]
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *options))
    trainer.model.forward = lambda batch: {
        name: weight * torch.nan
        for name, weight in zip("ab", trainer.model.layers[0].bias[:2], strict=True)
    }
    text = "a is nan, b is nan, total_loss is nan; 7 are accepted"
    with pytest.raises(FloatingPointError, match=text):
        trainer.train()


def test_the_optimizer_and_the_schedule_of_the_page_are_chosen_by_its_command(page, tmp_path):
    options = shlex.split(COMMAND)[4:]
    assert options[::2] == ["SOLVER.OPTIMIZER.NAME", "SOLVER.LR_SCHEDULER_BUILDER"]
    own = ["SOLVER.WARMUP_ITERS", 4, "SOLVER.BASE_LR", 0.01, "SOLVER.MOMENTUM", 0.0]
    own += ["SOLVER.WEIGHT_DECAY", 0.0, "DATASETS.TEST", ()]
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *options, *own))
    assert type(trainer.optimizer) is page["CentralizedSGD"]
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train(0, 1)
    for name, parameter in trainer.model.named_parameters():
        moved = before[name] - parameter.detach()
        if parameter.dim() > 1:
            assert torch.allclose(moved.sum(1), torch.zeros(len(moved)), atol=1e-6)
        else:
            assert torch.allclose(moved, 0.0025 * parameter.grad, atol=1e-6)
    trainer.train(1, 10)
    rates = [rate for rate, _ in trainer.storage.history("lr").values()]
    falling = [0.01 / 1.25**0.5, 0.01 / 1.5**0.5]
    assert rates[:6] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, *falling])


def gan(page, folder, *options):
    """The script of the page, with other settings: its trainer, before the first step."""
    names = run(TWO, "docs/extending.md")
    found = []
    names["run"] = lambda args, trainer, cfg: found.append((trainer, cfg))
    names["main"](None)
    [(trainer, cfg)] = found
    cfg.merge_from_list(["OUTPUT_DIR", str(folder), "LOG.WRITERS", ["console", "json"], *options])
    default_setup(cfg, None)
    return trainer(cfg)


def test_the_gan_prints_both_losses_and_learns(page, tmp_path):
    trainer = gan(page, tmp_path, "SOLVER.MAX_ITER", 20)
    trainer.train()
    losses = {
        name: trainer.storage.history(name).values() for name in ("loss_judge", "loss_generator")
    }
    log = (tmp_path / "log.txt").read_text()
    assert re.search(r"after 20/20  loss_judge: \S+  loss_generator: ", log)
    line = json.loads((tmp_path / "metrics.json").read_text().splitlines()[0])
    assert line["loss_generator"] == pytest.approx(
        statistics.median(value for value, _ in losses["loss_generator"])
    )
    assert losses["loss_judge"][-1] < losses["loss_judge"][0]


def test_the_gan_updates_each_part_by_its_own_loss(page, tmp_path):
    """One step by hand, with plain Adam for both parts."""
    trainer = gan(page, tmp_path, "SOLVER.MAX_ITER", 1, "SOLVER.WARMUP_ITERS", 0)
    model = copy.deepcopy(trainer.model)
    real = next(iter(trainer.build_train_loader(trainer.cfg)))
    state = torch.get_rng_state()
    optimizers = {
        part: torch.optim.Adam(getattr(model, part).parameters(), 0.002)
        for part in ("judge", "generator")
    }
    for part, optimizer in optimizers.items():
        loss = model(real, part)
        gradients = torch.autograd.grad(loss, [*getattr(model, part).parameters()])
        for parameter, gradient in zip(getattr(model, part).parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    torch.set_rng_state(state)
    trainer.train()
    for name, value in model.state_dict().items():
        assert torch.allclose(trainer.model.state_dict()[name], value, atol=1e-6), name


def test_the_gan_resumes_both_optimizers_and_a_schedule_exactly(page, tmp_path):
    weights = []
    for folder, stops in ((tmp_path / "whole", (30,)), (tmp_path / "pieces", (20, 30))):
        for stop in stops:
            trainer = gan(page, folder, "SOLVER.CHECKPOINT_PERIOD", 10)
            trainer.judge_scheduler = torch.optim.lr_scheduler.StepLR(trainer.judge_optimizer, 25)
            step = trainer.judge_scheduler.step
            trainer.register_hooks([hooks.CallbackHook(after_step=lambda _, step=step: step())])
            trainer.resume_or_load()
            trainer.train(max_iter=stop)
        assert trainer.judge_optimizer.param_groups[0]["lr"] == pytest.approx(0.0002)
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_of_the_gan_the_first_optimizer_is_clipped_and_two_keys_have_no_effect(page, tmp_path):
    clip = ["SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "full_model"]
    options = [*clip, "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", 1e-6, "SOLVER.MAX_ITER", 1]
    trainer = gan(page, tmp_path / "clipped", *options)
    trainer.train()
    norms = [
        torch.stack([parameter.grad.norm() for parameter in part.parameters()]).norm().item()
        for part in (trainer.model.generator, trainer.model.judge)
    ]
    assert norms[0] == pytest.approx(1e-6, rel=1e-3)
    assert norms[1] > 1e-3

    weights = []
    for others in ([], ["SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", "bfloat16"]):
        trainer = gan(page, tmp_path / f"run{len(others)}", "SOLVER.MAX_ITER", 2, *others)
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_loss_of_the_gan_that_is_nan_ends_the_run_at_the_next_checkpoint(page, tmp_path):
    trainer = gan(page, tmp_path, "SOLVER.CHECKPOINT_PERIOD", 4)
    trainer.model.judge[0].weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="the model is not finite"):
        trainer.train()
    assert trainer.iter == 3
    assert [*tmp_path.glob("*.pth")] == []


@pytest.mark.slow
def test_the_gan_trains_on_two_processes(tmp_path):
    (tmp_path / "train.py").write_text(TWO)
    command = [sys.executable, "train.py", "--num-gpus", "2", "MODEL.DEVICE", "cpu"]
    options = ["SOLVER.MAX_ITER", "4", "MODEL.DDP.FIND_UNUSED_PARAMETERS", "True"]
    subprocess.run([*command, *options], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "output/gan/model_final.pth").exists()


def test_a_compressed_checkpoint_is_resumed_and_a_damaged_one_is_an_error(page, tmp_path):
    model = nn.Linear(100, 100)
    checkpointer = Checkpointer(model, tmp_path, format=page["Compressed"]())
    checkpointer.save("model")
    again = nn.Linear(100, 100)
    Checkpointer(again, tmp_path, format=page["Compressed"]()).resume_or_load("")
    assert torch.equal(again.weight, model.weight)
    assert gzip.decompress((tmp_path / "model.pth").read_bytes())[:2] == b"PK"
    checkpointer.remove("model")
    assert sorted(os.listdir(tmp_path)) == ["last_checkpoint", "run_id"]
    (tmp_path / "model.pth").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"cannot read '\S+model\.pth': Not a gzipped file"):
        Checkpointer(model, tmp_path, format=page["Compressed"]()).resume_or_load("")


def test_of_compressed_checkpoints_the_last_iteration_of_the_run_is_the_newest(page, tmp_path):
    for folder, iterations in ((tmp_path / "run", (9, 29, 19)), (tmp_path / "other", (39,))):
        checkpointer = Checkpointer(nn.Linear(1, 1), folder, format=page["Compressed"]())
        for iteration in iterations:
            # the names say nothing
            checkpointer.save(f"model_{100 - iteration}", iteration=iteration)
    shutil.copy(tmp_path / "other/model_61.pth", tmp_path / "run")
    (tmp_path / "run/last_checkpoint").unlink()
    again = Checkpointer(nn.Linear(1, 1), tmp_path / "run", format=page["Compressed"]())
    assert again.resume_or_load("") == {"iteration": 29}


def test_the_store_keeps_files_by_name(tmp_path):
    page = run(STORE.partition("@STORE_REGISTRY")[0], "docs/extending.md")
    page["ARCHIVE"] = str(tmp_path / "archive")
    store = page["Archive"]("archive://run1")
    (tmp_path / "here").write_text("1")
    store.put(str(tmp_path / "here"), "a/b")
    assert [*store.list()] == ["a/b"]
    store.get("a/b", str(tmp_path / "there"))
    assert (tmp_path / "there").read_text() == "1"
    store.remove("a/b")
    with pytest.raises(FileNotFoundError):
        store.get("a/b", str(tmp_path / "there"))


def test_the_loader_goes_on_after_a_resume(page, tmp_path):
    def make():
        model = Weight(lambda weight, batch: (weight * batch[0] - batch[1]).square().mean())
        trainer = SimpleTrainer(model, page["Sine"](8), torch.optim.SGD(model.parameters(), lr=0.1))
        checkpointer = Checkpointer(model, tmp_path, trainer=trainer)
        trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 3, save_last=False)])
        return trainer, checkpointer

    whole, _ = make()
    whole.train(0, 7)
    trainer, checkpointer = make()
    checkpointer.load(tmp_path / "model_0000002.pth")
    trainer.train(3, 7)
    assert torch.equal(trainer.model.weight, whole.model.weight)


def test_the_plug_in_in_20_lines_adds_the_hook_by_its_key(plug_in, tmp_path, monkeypatch):
    monkeypatch.setattr(HOOK_REGISTRY, "_objects", dict(HOOK_REGISTRY))
    HOOK_REGISTRY._objects.pop("CountSamples", None)
    (plug_in("my_parts", PLUG_IN) / "hooks.py").write_text(HOOK)
    # as `plug_in` has installed it
    assert (
        ENTRY_POINT == '[project.entry-points."trainkit.projects"]\nmy_parts = "my_parts.plugin"\n'
    )
    assert len(PLUG_IN.splitlines()) <= 20
    for is_on in (False, True):
        trainer = DefaultTrainer(tiny_cfg(tmp_path, "LOG.SAMPLES", is_on))
        assert sum(isinstance(hook, hooks.CountSamples) for hook in trainer.hooks) == is_on
    again = DefaultTrainer(trainer.cfg)  # its config is prepared already
    assert sum(isinstance(hook, hooks.CountSamples) for hook in again.hooks) == 1


def test_the_plug_in_with_an_option_lets_ranks_share_their_data(
    plug_in, tmp_path, monkeypatch, as_rank
):
    plug_in("pairs", PAIRS)
    cfg = tiny_cfg(tmp_path)
    args = default_argument_parser().parse_args(["--pairs"])
    with pytest.raises(ConfigError, match="MODEL.PAIRS is True with 1 processes"):
        default_setup(cfg, args)
    assert cfg.MODEL.PAIRS is True
    as_rank(3, 4)
    monkeypatch.setattr(comm, "set_data_ranks", lambda *ranks: found.append(ranks))
    found = []
    check_values(cfg)
    prepare_projects(cfg)
    assert found[-1] == (1, 2)


def test_the_table_of_what_needs_a_project_has_each_import():
    table = page_text("projects/README.md").partition("## Delete a project")[2]
    table = table.partition("Tools that are not in the table")[0]
    rows = set()
    project = ""
    for first, needed_by in re.findall(r"^\|(.+?)\|(.+?)\|", table, re.MULTILINE):
        project = first.strip("` ") or project
        rows |= {(project, name) for name in re.findall("`(.+?)`", needed_by)}
    found = set()
    for file in ROOT.glob("projects/*/**/*.py"):
        owner = file.relative_to(ROOT).parts[1]
        source = file.read_text()
        if "tests" in file.parts or file.name == "conftest.py" or "projects" not in source:
            continue
        for name in imported_projects(ast.parse(source)):
            words = re.findall(r"\w+", name.partition("projects.")[2])
            found |= {(word, owner) for word in words[:1] if word != owner}
    assert len(found) > 10
    assert found <= rows


def test_a_script_has_keys_of_its_own():
    cfg = run(SCRIPT, "docs/extending.md")["cfg"]
    cfg.merge_from_list(["MODEL.WIDTH", "32", "TEST.SHOW_ERRORS", "True"])
    assert (cfg.MODEL.WIDTH, cfg.TEST.SHOW_ERRORS) == (32, True)
