"""Jobs with planted mistakes, and jobs without."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from trainkit.projects.preflight import checks, job
from trainkit.projects.preflight.divided import Draw, missing
from trainkit.projects.preflight.evaluated import Answers
from trainkit.projects.preflight.findings import LOOK

from projects.digits import load_split
from tests.cuda import needs_cuda
from tests.docs.pages import blocks, page
from tests.engine.job import tiny_cfg
from tests.forked import run_forked, script
from trainkit.config import get_cfg
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultTrainer, SimpleTrainer
from trainkit.modeling import MODEL_REGISTRY

PAGE = "docs/preflight.md"
(OWN,) = blocks(PAGE, "python")
JOB = Path(__file__).with_name("planted.py")
CLIP = [
    "SOLVER.CLIP_GRADIENTS",
    {"ENABLED": True, "CLIP_TYPE": "full_model"},
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE",
]
ADAMW = [
    "SOLVER.OPTIMIZER.NAME",
    "AdamW",
    "SOLVER.OPTIMIZER.BETAS",
    "[0.9, 0.98]",
    "SOLVER.BASE_LR",
    0.01,
]
LATE = ["SOLVER.SCHEDULES"]
LATE += [[{"NAME": "Linear", "END": 10}, {"NAME": "Polynomial", "BEGIN": 150, "POWER": 0.9}]]
JUDGED = ["TEST.EVAL_PERIOD", 5, "TEST.EVAL_AT_START", True]
JUDGED += ["CHECKPOINT.BEST_METRIC", "classification/top1"]
JUDGED += ["EARLY_STOPPING.METRIC", "classification/top1"]
LONG = ["SOLVER", {"MAX_ITER": 10**10, "WARMUP_ITERS": 9 * 10**9, "CHECKPOINT_PERIOD": 1}]
LONG += ["CHECKPOINT.MAX_TO_KEEP", 10**9]


def start(folder, *options):
    """A forked process does not remove temporary folders at its end."""
    begin = script(JOB, *options, "OUTPUT_DIR", "out")
    return run_forked(lambda: (setattr(tempfile, "tempdir", str(folder)), begin()), folder)


def preflight(folder, *options):
    """Exit code, names of problems, name -> verdict, and what was printed."""
    done = start(folder, "--preflight-json", "found.json", *options)
    found = json.loads((folder / "found.json").read_text())
    assert not (folder / "out").exists()
    verdicts = {finding["name"]: finding["verdict"] for finding in found}
    return (
        done.returncode,
        {n for n, v in verdicts.items() if v not in ("sound", "not asked")},
        verdicts,
        done.stdout,
    )


@pytest.mark.slow
def test_a_sound_job_is_sound_and_nothing_is_written(tmp_path):
    code, problems, verdicts, text = preflight(tmp_path, "--preflight", "SOLVER.MAX_ITER", "13ep")
    assert code == 0, text
    assert problems == set(), text
    cells = [line.split("|")[1] for line in page(PAGE).splitlines() if line.startswith("| `")]
    assert [*verdicts] == re.findall(r"`(\w+)`", " ".join(cells))
    assert re.search(r"picture +sound +([·░▒▓█]{16} *){4}\n", text)
    assert re.search(r"time +sound +about \d+\.\d min; an evaluation takes \d+\.\d s\n", text)
    assert re.search(
        r"memory +sound +[\d,]+ of [\d,]+ MiB; a batch can have at least \d+ samples\n", text
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "code", "printed"), [("SIGINT", 130, "interrupted\n"), ("SIGTERM", 143, "")]
)
def test_an_interrupted_check_ends_at_once_and_leaves_nothing(tmp_path, plant, code, printed):
    command = [sys.executable, JOB, "--preflight", "MODEL.PLANT", plant, "OUTPUT_DIR", "out"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr == printed
    assert [*tmp_path.glob("preflight-*"), *tmp_path.glob("out")] == []


# without a name: no mistake
FURTHER: list[tuple[str, str, list[object]]] = [
    ("shifted labels in VAL", "val_labels", []),
    ("two classes swapped in VAL", "val_labels", []),
    ("a third of the labels shuffled in VAL", "val_labels", []),
    ("not divided by 255 in VAL", "val_inputs", []),
    ("colors, in another order in VAL", "val_inputs", []),
    ("colors, turned by one in VAL", "val_inputs", []),
    ("evaluation changes weights", "evaluates", []),
    ("evaluation changes statistics", "evaluates", []),
    ("evaluation changes modes", "evaluates", []),
    ("evaluation freezes", "evaluates", []),
    ("evaluation draws", "evaluates", []),
    ("evaluation fails", "evaluates", []),
    ("kept losses", "growth", []),
    ("kept features", "growth", []),
    ("batch norm of one sample", "batch_norm", ["SOLVER.IMS_PER_BATCH", 1]),
    ("last batch of one", "batch_norm", []),
    ("", "schedule", ["SOLVER.STEPS", (10, 20)]),
    ("", "schedule", ["SOLVER.STEPS", (500,)]),
    ("steps of epochs", "schedule", []),
    ("short cycle", "schedule", []),
    ("sigmoid", "scores", []),
    ("no logarithm", "scores", []),
    ("probabilities with logits", "scores", []),
    ("one layer three times", "shared", []),
    ("same memory", "shared", []),
    ("", "schedule", ["SOLVER.WARMUP_ITERS", 100, "SOLVER.WARMUP_METHOD", "constant"]),
    ("", "schedule", [*LATE]),
    ("many", "", []),
    ("labels in turn", "", []),
    ("sorted by class in VAL", "", []),
    ("colors", "", []),
    ("short queue", "", []),
    ("evaluation of its own", "", []),
    ("log softmax", "", []),
    ("tied, as declared", "", []),
    ("cosine of torch", "", []),
    ("random augmentation", "", []),
]


@pytest.mark.parametrize(
    ("plant", "names", "options"),
    [
        pytest.param("shuffled labels", "labels", [], marks=pytest.mark.slow),
        pytest.param("overlap", "overlap", [], marks=pytest.mark.slow),
        pytest.param("early optimizer", "optimizer", [], marks=pytest.mark.slow),
        pytest.param("eval mode", "modes", [], marks=pytest.mark.slow),
        ("detached", "runs", []),
        pytest.param("rate", "learns", ["SOLVER.BASE_LR", 100], marks=pytest.mark.slow),
        pytest.param("normalized twice", "values", [], marks=pytest.mark.slow),
        ("frozen", "frozen", []),
        pytest.param("item", "host_reads", [], marks=pytest.mark.slow),
        ("typo", "settings", ["MODEL.HIDEN", 64]),
        (
            "large outputs, dead channels, unused part",
            "first_loss dead gradients clipping",
            [*CLIP, 1e-6],
        ),
        pytest.param(
            "no class 3, repeated batches, idle augmentation",
            "classes repeats augmentation",
            [],
            marks=pytest.mark.slow,
        ),
        pytest.param("unseeded augmentation", "augmentation", [], marks=pytest.mark.slow),
        ("", "disk schedule decay clipping", [*LONG, "SOLVER.WEIGHT_DECAY_NORM", 0.1, *CLIP, 1e6]),
        pytest.param("many, leak", "overlap", [], marks=pytest.mark.slow),
        ("overlap, with paths", "overlap", []),
        pytest.param("", "overlap", ["DATASETS.TEST", ["planted_train"]], marks=pytest.mark.slow),
        ("shuffled labels in VAL", "val_labels", []),
        ("other normalization in VAL", "val_inputs", []),
        ("dropout stays on", "evaluates", []),
        pytest.param("kept graph", "growth", [], marks=pytest.mark.slow),
        pytest.param("softmax", "scores", [], marks=pytest.mark.slow),
        ("", "", [*JUDGED]),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in FURTHER),
        pytest.param("random hook", "reproducible", ["--preflight"], marks=pytest.mark.slow),
        pytest.param("loader without state", "resumes", ["--preflight"], marks=pytest.mark.slow),
        pytest.param("never resumed", "resumes", ["--preflight"], marks=pytest.mark.slow),
        # no mistake: a test set with the inputs of a training set without labels
        pytest.param("no labels", "", ADAMW, marks=pytest.mark.slow),
        pytest.param("own step", "", [], marks=pytest.mark.slow),
    ],
)
def test_a_planted_mistake_is_named(tmp_path, monkeypatch, plant, names, options):
    monkeypatch.setattr(checks, "READ_SEC", 1.0)
    options = options if "--preflight" in options else ["--preflight-quick", *options]
    code, problems, verdicts, text = preflight(tmp_path, "MODEL.PLANT", plant, *options)
    assert code == (3 if names else 0), text
    assert {*names.split()} <= problems, text
    assert ("reproducible" in verdicts) == ("--preflight" in options)
    assert ([*verdicts] == ["runs"]) == (names == "runs")


@pytest.mark.parametrize(
    ("plant", "names"),
    [
        ("overlap, random augmentation", "overlap"),
        # there is no time to read enough
        pytest.param("many, leak", "overlap", marks=pytest.mark.slow),
        ("evaluation fails", "val_labels val_inputs"),
        # a model that knows nothing cannot judge others
        pytest.param("shuffled labels", "val_labels", marks=pytest.mark.slow),
        ("", "clipping"),
    ],
)
def test_a_question_that_cannot_be_asked_says_so(tmp_path, monkeypatch, plant, names):
    monkeypatch.setattr(checks, "READ_SEC", 0.001)
    _, problems, verdicts, text = preflight(
        tmp_path, "--preflight-quick", "MODEL.PLANT", plant, "SOLVER.MAX_ITER", 40
    )
    not_asked = " ".join(name for name in verdicts if verdicts[name] == "not asked")
    assert {*names.split()} <= {*re.findall(r"\w+", not_asked)}, text
    assert problems <= {"evaluates", "labels"}, text


def test_a_failing_evaluation_is_told_once(tmp_path):
    code, problems, verdicts, text = preflight(
        tmp_path, "--preflight", "MODEL.PLANT", "evaluation fails"
    )
    assert code == 3, text
    assert problems == {"evaluates"}, text
    assert "RuntimeError: no such metric" in text
    assert [verdicts[name] for name in ("reproducible", "resumes")] == ["not asked"] * 2


@pytest.mark.parametrize(("read", "train", "others"), [(2_000, 400_000, 2_000), (900, 1_000, 300)])
def test_a_leak_of_one_percent_is_no_finding_and_the_smallest_leak_that_is_promised_is_one(
    read, train, others
):
    draw = Draw(read, train, others)
    rng = np.random.default_rng(0)

    def share_of_findings(leak):
        in_train = round(leak * others)
        found = rng.hypergeometric(in_train, train - in_train, read, 2_000)
        return (found > draw.limit).mean()

    assert share_of_findings(0.01) < 0.02
    assert share_of_findings(draw.smallest_leak) > 0.95
    assert share_of_findings(draw.smallest_leak / 10) < 0.5
    whole = Draw(train, train, others)
    assert whole.limit == pytest.approx(others / 100)
    assert Draw(10, train, others).smallest_leak > 1


def test_the_share_that_is_right_by_chance_is_that_of_shuffled_answers():
    generator = torch.Generator().manual_seed(0)
    truth = (torch.rand(300, generator=generator) < 0.9).long()
    given = (torch.rand(300, generator=generator) < 0.8).long()
    shuffled = [
        (truth == given[torch.randperm(300, generator=generator)]).double().mean()
        for _ in range(2_000)
    ]
    answers = Answers(truth, given)
    assert answers.chance == pytest.approx(float(sum(shuffled) / 2_000), abs=0.002)
    assert not answers.is_above_chance(2)
    assert Answers(truth, truth).is_above_chance(5)


def labels_of_scans(folder, *options):
    """The verdict about the labels of the digits, after the model has learned."""
    cfg = get_cfg()
    cfg.merge_from_file("projects/digits/config.yaml")
    cfg.merge_from_list(["OUTPUT_DIR", str(folder), "LOG.WRITERS", [], *options])
    given = cfg.clone()
    trainer = DefaultTrainer(cfg)
    scans = job.Job(trainer, given, "")
    scans.make_steps()
    found = [*scans.ask(checks.learns), *scans.ask(checks.labels)]
    return {finding.name: finding.verdict for finding in found}["labels"]


def register_scans(name, noise, is_shuffled=False):
    """Scans with a noise of this deviation; the pixels are between 0 and 1."""
    rng = np.random.default_rng(0)
    samples = load_split("train")
    labels = [sample["label"] for sample in samples]
    if is_shuffled:
        rng.shuffle(labels)
    noisy = []
    for sample, label in zip(samples, labels, strict=True):
        image = sample["image"] + rng.normal(0, 16 * noise, (8, 8))
        noisy.append({"image": image.astype(np.float32), "label": label})
    DatasetCatalog.register(name, lambda: noisy)


@pytest.mark.parametrize("batch_size", [40, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_labels_that_belong_to_noisy_inputs_are_no_finding(tmp_path, batch_size, seed):
    name = f"noisy_{batch_size}_{seed}"
    register_scans(name, noise=1)
    options = ["DATASETS.TRAIN", [name], "SEED", seed, "SOLVER.IMS_PER_BATCH", batch_size]
    assert labels_of_scans(tmp_path, *options) == "sound"


def test_shuffled_labels_of_noisy_inputs_are_a_finding(tmp_path):
    register_scans("noisy_shuffled", noise=1, is_shuffled=True)
    options = ["DATASETS.TRAIN", ["noisy_shuffled"], "SOLVER.IMS_PER_BATCH", 40]
    assert labels_of_scans(tmp_path, *options) == LOOK


def test_a_model_that_does_not_know_its_own_batch_is_not_asked_for_others(tmp_path):
    options = ["SOLVER.BASE_LR", 1.0, "SOLVER.IMS_PER_BATCH", 40]
    assert labels_of_scans(tmp_path, *options) == "not asked"


def test_too_few_samples_are_not_asked_for(tmp_path):
    register_scans("noisy_short", noise=1, is_shuffled=True)
    samples = DatasetCatalog.get("noisy_short")[:150]
    DatasetCatalog.register("noisy_few", lambda: samples)
    options = ["DATASETS.TRAIN", ["noisy_few"], "SOLVER.IMS_PER_BATCH", 40]
    assert labels_of_scans(tmp_path, *options) == "not asked"


def test_a_class_is_missing_only_if_so_many_samples_of_it_were_to_be_expected():
    here = Counter({0: 500, 1: 480, 2: 20})
    there = Counter({0: 60, 1: 40})
    assert missing(here, there, is_whole=True) == [2]
    assert missing(here, there, is_whole=False) == []  # two of 100 were to be expected
    assert missing(here, Counter({0: 600, 1: 400}), is_whole=False) == [2]


@pytest.fixture
def checked(tmp_path):
    """Makes a job in this process, after its first steps."""

    def make(*options, trainer_class=DefaultTrainer):
        cfg = tiny_cfg(tmp_path / "output", *options)
        made = job.Job(trainer_class(cfg), cfg, "none")
        made.make_steps()
        return made

    return make


def verdicts_of(findings):
    return {finding.name: finding.verdict for finding in findings}


@pytest.mark.parametrize(("second_has", "verdict"), [("rest", "sound"), ("nothing", "wrong")])
def test_parameters_may_be_in_an_optimizer_that_is_an_attribute_of_the_trainer(
    checked, second_has, verdict
):
    """As those of the judge of a GAN."""

    class Two(DefaultTrainer):
        def __init__(self, cfg):
            super().__init__(cfg)
            if second_has == "rest":
                rest = [*self.model.parameters()][2:]
                self.second_optimizer = torch.optim.SGD(rest, lr=0.1)

        @classmethod
        def build_optimizer(cls, cfg, model):
            return torch.optim.SGD([*model.parameters()][:2], lr=0.1)

    one = checked("SOLVER.WEIGHT_DECAY", 0.0, trainer_class=Two)
    assert verdicts_of(one.ask(checks.optimizer))["optimizer"] == verdict


def test_a_first_loss_after_weights_and_labels_of_small_batches_are_not_asked(checked, tmp_path):
    other = DefaultTrainer(tiny_cfg(tmp_path / "other"))
    other.checkpointer.save("known")
    known = str(tmp_path / "other/known.pth")
    for options, first_loss, has_few in [
        ([], "sound", False),
        (["MODEL.WEIGHTS", known], "not asked", False),
        (["SOLVER.IMS_PER_BATCH", 7], "sound", True),  # of two classes
    ]:
        one = checked(*options)
        assert verdicts_of(one.ask(checks.learns))["first_loss"] == first_loss
        [labels] = one.ask(checks.labels)
        assert (labels.text == "a batch has few samples of each class") == has_few


@pytest.mark.parametrize(
    ("step_sec", "batch_sec", "verdict", "advice"),
    [
        (0.03, 0.029, "sound", ""),
        (0.03, 0.031, LOOK, "2 workers would suffice"),
        (0.001, 0.019, "sound", ""),
        (0.001, 0.021, LOOK, "21 workers would suffice"),
    ],
)
def test_a_loader_is_slow_if_a_batch_takes_longer_than_a_step_and_than_20_ms(
    checked, monkeypatch, step_sec, batch_sec, verdict, advice
):
    one = checked()
    one.sec = {"forward": step_sec / 4, "backward": 3 * step_sec / 4}
    monkeypatch.setattr(checks, "timeit", lambda call, number: number * batch_sec)
    [finding] = [found for found in one.ask(checks.host_reads) if found.name == "loader"]
    assert (finding.verdict, finding.advice) == (verdict, advice)


@MODEL_REGISTRY.register()
class PartlyDead(nn.Module):
    """Of eight channels the first ones are never above zero."""

    def __init__(self, cfg):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        nn.init.constant_(self.body.bias, 100.0)
        nn.init.constant_(self.body.bias[: cfg.MODEL.DEAD], -100.0)

    def forward(self, batch):
        scores = self.head(self.body(batch["x"]).relu())
        if not self.training:
            return scores
        return {"loss": 1e-3 * nn.functional.cross_entropy(scores, batch["label"])}


def test_a_quarter_of_dead_channels_is_only_shown(checked):
    for number, share, verdict in ((2, "25%", "sound"), (3, "38%", LOOK)):
        one = checked("MODEL.NAME", "PartlyDead", "MODEL.DEAD", number)
        [dead] = [found for found in one.ask(checks.optimizer) if found.name == "dead"]
        assert f"{share} of relu" in dead.text
        assert dead.verdict == verdict


def test_more_than_90_percent_of_the_memory_is_a_finding(checked, monkeypatch):
    one = checked()
    all_kib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**10
    found = []
    for share in (0.89, 0.91):
        usage = SimpleNamespace(ru_maxrss=int(share * all_kib))
        monkeypatch.setattr(checks.resource, "getrusage", lambda who, usage=usage: usage)
        found.append(verdicts_of(one.ask(checks.disk))["memory"])
    assert found == ["sound", LOOK]


def test_a_node_that_is_passed_on_as_a_whole_is_read(tmp_path, monkeypatch):
    cfg = tiny_cfg(tmp_path, "MODEL.MINE", {"WIDTH": 3, "DEPTH": 2})
    one = job.Job(DefaultTrainer(cfg), cfg, "none")
    for reads, verdict in [
        ([], "wrong"),
        (["MODEL.MINE"], "sound"),
        (["MODEL.MINE", "MODEL.MINE.WIDTH"], "wrong"),
        (["MODEL.MINE", "MODEL.MINE.WIDTH", "MODEL.MINE.DEPTH"], "sound"),
    ]:
        monkeypatch.setattr(checks, "reads", dict.fromkeys(reads))
        assert checks.settings(one).verdict == verdict


@pytest.mark.slow
def test_a_finding_is_allowed_by_its_name_also_that_of_ones_own_check(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_check.py").write_text(OWN)
    options = ["--preflight-quick", "--preflight-allow", "frozen", "--preflight-allow", "epochs"]
    code, problems, _, text = preflight(
        tmp_path, *options, "IMPORTS", "[own_check]", "MODEL.PLANT", "frozen"
    )
    assert code == 0, text
    assert problems == {"frozen", "epochs"}, text
    assert text.count("look at this (allowed)") == 2
    done = start(tmp_path, "--preflight-quick", "--preflight-allow", "frzen")
    assert done.returncode == 2
    assert "no finding is called frzen" in done.stderr
    done = start(tmp_path, "--preflight-json", "no/folder.json")
    assert done.returncode == 2
    assert "there is no folder for 'no/folder.json'" in done.stderr


def test_a_check_builds_another_trainer_with_settings_that_win(tmp_path):
    cfg = tiny_cfg(tmp_path / "output", "SOLVER.MAX_ITER", 5)
    checked = job.Job(DefaultTrainer(cfg), cfg, "none")
    trainer = checked.build("SOLVER.MAX_ITER", 7, "LOG.WRITERS", [])
    assert trainer.max_iter == 7
    assert trainer.cfg.LOG.WRITERS == []  # without an option it is ["json"]
    assert checked.trainer.max_iter == 5


@pytest.mark.slow
def test_several_processes_are_compared_with_one(tmp_path):
    """Their loss is smaller, and batch norm has other statistics in each process."""
    code, problems, _, text = preflight(
        tmp_path, "--preflight", "--num-gpus", "2", "MODEL.PLANT", "sum"
    )
    assert code == 3, text
    assert problems == {"first_loss", "processes"}, text
    assert "different among them: buffers" in text


@pytest.mark.slow
def test_on_an_accelerator_the_largest_batch_that_fits_is_searched(tmp_path, monkeypatch):
    cfg = tiny_cfg(tmp_path / "output", "MODEL.NAME", "NeedsMemory")
    checked = job.Job(DefaultTrainer(cfg), cfg, "none")
    assert checked.largest_batch(2) == "at least 16"
    monkeypatch.setattr(job, "accelerator_runs_ahead", lambda: True)
    assert checked.largest_batch(0.1) == "22"
    assert checked.largest_batch(2) == "22"
    assert checked.largest_batch(9) == "23"


@needs_cuda
def test_on_a_gpu_waits_that_the_dispatcher_does_not_see_are_found():
    class Masked(nn.Linear):
        def forward(self, batch):
            return super().forward(batch)[batch[:, 0] > 0].sum()

    batch, model, watcher = torch.ones(2, 4, device="cuda"), Masked(4, 1).cuda(), job.Watcher()
    trainer = SimpleTrainer(model, [batch], torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks([watcher])
    trainer.train(0, 1)
    assert {read.rpartition(":")[0] for read in watcher.reads} == {__file__}
