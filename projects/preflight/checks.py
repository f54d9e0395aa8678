"""The checks: one for each part of the report, in its order; each has the name of its first finding."""

import json
import math
import os
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from timeit import timeit
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path
from torch.utils.data import IterableDataset
from trainkit.projects.preflight.findings import LOOK, Finding, NotAsked, check, judge, some
from trainkit.projects.preflight.job import STEPS, Job, classes_of, digest
from trainkit.projects.preflight.options import KILLED, reads
from trainkit.projects.replay.checkpoints import Saved, prove_equal

from trainkit.checkpoint.file import read_file
from trainkit.config import CfgNode, get_cfg
from trainkit.config.config import changed_settings
from trainkit.data import DatasetCatalog
from trainkit.solver.param_groups import NORM_LAYERS
from trainkit.utils import comm
from trainkit.utils.device import accelerator_runs_ahead, unwrap_model
from trainkit.utils.env import get_rng_state
from trainkit.utils.periods import parse_time
from trainkit.utils.plugins import CONFIG_KEYS


@check
def runs(job: Job) -> Finding:
    job.make_steps()
    return judge("runs", False, f"{STEPS} steps of {job.trainer.max_iter}")


@check
def learns(job: Job) -> Iterator[Finding]:
    """Does it learn at all?"""
    trainer = job.build(
        "SOLVER.WARMUP_ITERS",
        0,
        "SOLVER.STEPS",
        (),
        "SOLVER.LR_SCHEDULER_NAME",
        "WarmupMultiStepLR",
    )
    trainer.data_loader = job.batches[:1] * 30
    trainer.train(0, min(30, trainer.max_iter))
    if "total_loss" not in trainer.storage.latest():
        raise NotAsked("this trainer stores no total_loss", "learns, first_loss, labels")
    losses = [value for value, _ in trainer.storage.history("total_loss").values()]
    known, *others = [classes_of(batch, ndim=1) for batch in job.batches]
    # the cross entropy of the best answer that is the same for all samples
    constant = -sum(n / len(known) * math.log(n / len(known)) for n in Counter(known).values())
    text = f"the loss of one batch goes from {losses[0]:.3g} to {losses[-1]:.3g} in {len(losses)} steps"
    text += f"; the same answer for each sample has {constant:.3g}" if constant else ""
    is_bad = not losses[-1] < min(losses[0], constant or math.inf)
    yield judge("learns", is_bad, text, "try a lower SOLVER.BASE_LR; does the model see its input?")

    classes = Counter(label for labels in (known, *others) for label in labels)
    if len(classes) < 2:
        raise NotAsked("no classification", "first_loss, labels")
    ratio = losses[0] / math.log(len(classes))
    text = f"{losses[0]:.3g}, {ratio:.2g} times that of a guess among {len(classes)} classes"
    is_far = not job.cfg.MODEL.WEIGHTS and not 0.5 < ratio < 2
    yield judge("first_loss", is_far, text, "let the first outputs be small", LOOK)

    model = trainer.model.eval()
    with torch.no_grad():
        outputs = [model(batch) for batch in job.batches[1:]]
    if len(known) < 4 * len(classes) or not all(
        isinstance(each, Tensor) and each.ndim == 2 for each in outputs
    ):
        raise NotAsked(
            "a batch has few samples of each class, or the model returns no logits", "labels"
        )
    truth = torch.tensor([label for labels in others for label in labels])
    share = (torch.cat(outputs).argmax(1).cpu() == truth).double().mean().item()
    chance = max(classes.values()) / classes.total()
    text = f"with one batch learned, {share:.0%} of others are right; the most frequent class has {chance:.0%}"
    yield judge(
        "labels",
        share <= chance + 2 * math.sqrt(chance / len(truth)),
        text,
        "do they belong to the inputs?",
    )


@check
def optimizer(job: Job) -> Iterator[Finding]:
    """Does every part learn?"""
    named, model = dict(job.model.named_parameters()), unwrap_model(job.ordinary.model)
    held = {id(value) for group in job.trainer.optimizer.param_groups for value in group["params"]}
    frozen = [name for name, value in named.items() if not value.requires_grad]
    lost = [name for name, value in named.items() if value.requires_grad and id(value) not in held]
    foreign = len(held - {id(value) for value in named.values() if value.requires_grad})
    text = f"trained, but not in it: {some(lost)}; in it, but not trained: {foreign}"
    yield judge(
        "optimizer", lost or foreign, text, "build it after the model is complete and frozen"
    )
    yield judge("frozen", frozen, some(frozen), "unfreeze them, or allow it", LOOK)
    kinds, parts = (_BatchNorm, nn.Dropout, type(model)), model.named_modules()
    modes = [
        name or "the model" for name, part in parts if isinstance(part, kinds) and not part.training
    ]
    yield judge("modes", modes, f"in eval mode: {some(modes)}", "call train()")
    unused = [name for name in named if name not in (*frozen, *job.watcher.trained)]
    text = f"zero or missing in {STEPS} steps: {some(unused)}"
    yield judge("gradients", unused, text, "are they used in the loss?", LOOK)
    silent = [
        ((~fires).double().mean(), place)
        for (_, place), fires in job.watcher.fired.items()
        if not fires.all()
    ]
    lines = some(f"{share:.0%} of {place}" for share, place in silent)
    text = f"channels never above zero in {STEPS // 2} steps: {lines}"
    yield judge(
        "dead",
        any(share > 0.25 for share, _ in silent),
        text,
        "lower the rate, or initialize otherwise",
        LOOK,
    )


@check
def values(job: Job) -> Iterator[Finding]:
    """Is the data what you think?"""
    texts, is_bad = [], False
    for (path, first), *others in zip(*map(tree_leaves_with_path, job.batches), strict=False):
        if isinstance(first, Tensor) and first.numel() > 1:
            of_all = torch.cat(
                [leaf.flatten().float() for leaf in (first, *(leaf for _, leaf in others))]
            )
            std, mean = torch.std_mean(of_all)
            field, kind = keystr(path).strip("[]'"), str(first.dtype).removeprefix("torch.")
            texts.append(
                f"{field} {[*first.shape]} {kind} from {of_all.min():.3g} to {of_all.max():.3g}"
            )
            texts[-1] += f", mean {mean:.2g}, std {std:.2g}"
            is_bad |= (
                first.is_floating_point()
                and first.ndim > 1
                and not (0.02 < std < 2 and abs(mean) < 2)
            )
    yield judge(
        "values",
        is_bad,
        "; ".join(texts[:6]),
        "normalize once; find values that are not finite",
        LOOK,
    )
    for images in [
        leaf for leaf in tree_leaves(job.batches[0]) if isinstance(leaf, Tensor) and leaf.ndim == 4
    ][:1]:
        yield judge("picture", False, _drawn(images))

    digests = [digest(batch) for batch in job.batches]
    steps = [i for i in range(1, len(digests)) if digests[i] == digests[i - 1]]
    text = f"batches that equal the one before, of {len(digests)}: {some(steps)}"
    yield judge("repeats", steps, text, "shuffle the samples", LOOK)
    again, state = digest(job.build().fetch()), digest(get_rng_state())
    names = job.cfg.DATASETS
    datasets = [
        _indexed(each) for each in (names.TRAIN, {*names.VAL, *names.TEST} - {*names.TRAIN})
    ]
    is_idle = len({digest(dataset[0]) for dataset in datasets[0][:1] for _ in range(8)}) == 1
    is_idle = is_idle and digest(get_rng_state()) != state
    text = (
        "first batches of two runs with one seed"
        + "; a sample draws random numbers that change nothing" * is_idle
    )
    yield judge(
        "augmentation", is_idle or again != digests[0], text, "use the global random generators"
    )

    train, others = ([*_facts(each)] for each in datasets)
    of_train, of_others = (
        {label for labels, _ in each for label in labels} for each in (train, others)
    )
    if not train or not others or len(of_train) < min(2, len(of_others)):
        raise NotAsked("no datasets with indices, or TRAIN has no labels", "overlap, classes")
    known = {each for _, each in train}
    common = sum(each in known for _, each in others)
    text = f"{common} of {len(others)} samples of VAL and TEST are among {len(train)} of TRAIN"
    yield judge("overlap", common > len(others) / 100, text, "divide the data before anything else")
    text = f"only in TRAIN: {some(sorted(of_train - of_others))}; not in it: {some(sorted(of_others - of_train))}"
    if of_others:
        yield judge(
            "classes", of_train != of_others, text, "divide each class in the same way", LOOK
        )


@check
def reproducible(job: Job) -> Finding:
    """Is it reproducible?"""
    whole, killed = job.start("whole"), job.start("killed", code=-signal.SIGKILL, **{KILLED: "1"})
    text = prove_equal(
        [read_file(whole / "model_0000002.pth")], Saved(2, 2, f"{killed}/model_0000002.pth", {})
    )
    if is_bad := "DIFFERENT" in text:
        words = [
            sys.executable,
            "-m",
            "trainkit.projects.replay",
            str(whole),
            "--iter",
            "0",
            "--",
            *job.command,
        ]
        text += f"; {job.run(*words).stdout.rpartition('verdict: ')[-1].strip()}"
    text = f"three steps in two processes: {text}"
    return judge("reproducible", is_bad, text, "seed what draws; DETERMINISTIC on a GPU")


@check
def resumes(job: Job) -> Finding:
    """Does it resume?"""
    whole, killed = (
        Path(job.folder, "whole", "fast_dev_run"),
        job.start("killed", "--resume", **{KILLED: "1"}),
    )
    text = prove_equal(
        [read_file(whole / "model_final.pth")], Saved(5, 2, f"{killed}/model_final.pth", {})
    )
    lost = (
        "; ".join(job.ordinary.describe_inexact())
        or "make it reproducible; what has a state needs a state_dict"
    )
    return judge("resumes", "DIFFERENT" in text, f"killed in its fourth step: {text}", lost)


@check
def host_reads(job: Job) -> Iterator[Finding]:
    """Does it wait?"""
    own = [line for line in job.watcher.reads if "site-packages" not in line]
    text = f"in the forward pass: {some(dict.fromkeys(own))}; {len(job.watcher.reads) - len(own)} in installed packages"
    yield judge("host_reads", own, text, "the device would wait; keep it a tensor", LOOK)
    step = sum(job.sec.values())
    shares = ", ".join(f"{name} {part / step:.0%}" for name, part in job.sec.items())
    trainer = job.build()
    trainer.fetch()  # starts the workers
    alone = timeit(trainer.fetch, number=STEPS) / STEPS
    text = f"a step has {1000 * step:.1f} ms ({shares}), a batch alone {1000 * alone:.1f} ms"
    workers = math.ceil(max(1, job.cfg.DATALOADER.NUM_WORKERS) * alone / step)
    yield judge("loader", alone > max(step, 0.02), text, f"{workers} workers would suffice", LOOK)


@check
def disk(job: Job) -> Iterator[Finding]:
    """Does it fit?"""
    trainer, cfg, steps = job.ordinary, job.trainer.cfg, job.trainer.max_iter
    save_sec = timeit(lambda: trainer.checkpointer.save("preflight"), number=1)
    eval_sec = timeit(lambda: job.trainer.test(cfg, job.trainer.model), number=1)
    period, eval_period = cfg.SOLVER.CHECKPOINT_PERIOD, cfg.TEST.EVAL_PERIOD
    if isinstance(period, str):  # a time
        saves = int(steps * sum(job.sec.values()) // parse_time(period, "SOLVER.CHECKPOINT_PERIOD"))
    else:
        saves = steps // period if period else 0
    evaluations = steps // eval_period if eval_period else 0
    files = Path(trainer.checkpointer.save_dir).rglob("preflight*")
    size = sum(file.stat().st_size for file in files if file.is_file())
    need = size * (min(saves, cfg.CHECKPOINT.MAX_TO_KEEP or saves) + 2)
    place = Path(os.path.abspath(job.cfg.CHECKPOINT.DIR or job.cfg.OUTPUT_DIR))
    free = shutil.disk_usage(
        next(folder for folder in (place, *place.parents) if folder.is_dir())
    ).free
    text = f"a checkpoint has {size / 2**20:.1f} MiB and takes {save_sec:.1f} s; all need {need / 2**30:.2f} of "
    yield judge("disk", need > free, f"{text}{free / 2**30:.0f} GiB", "set CHECKPOINT.MAX_TO_KEEP")
    total = steps * sum(job.sec.values()) + saves * save_sec + (evaluations + 1) * eval_sec
    yield judge("time", False, f"about {total / 60:.1f} min; an evaluation takes {eval_sec:.1f} s")

    peak = 2**10 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if accelerator_runs_ahead():
        peak = torch.accelerator.memory.max_memory_allocated()
        memory = torch.get_device_module().get_device_properties().total_memory
    text = f"{peak / 2**20:,.0f} of {memory / 2**20:,.0f} MiB; a batch can have {job.largest_batch(memory / peak)}"
    yield judge("memory", peak > 0.9 * memory, f"{text} samples", "make the batch smaller", LOOK)


@check
def schedule(job: Job) -> Iterator[Finding]:
    """Is the schedule what you think?"""
    named, scheduler, length = (
        job.model.named_parameters(),
        job.trainer.scheduler,
        job.trainer.max_iter,
    )
    if hasattr(scheduler, "schedule"):  # it is not one of torch
        rates = {
            i: scheduler.schedule(i, scheduler.base_lrs[0])
            for i in range(0, length, max(1, length // 30))
        }
        peak = max(rates, key=rates.__getitem__)
        bars = "".join(
            "▁▂▃▄▅▆▇█"[min(7, int(8 * rate / (rates[peak] or 1)))] for rate in rates.values()
        )
        text = f"{bars} from {rates[0]:.2g} to {rates[peak]:.2g} at {peak}, then {[*rates.values()][-1]:.2g}"
        yield judge(
            "schedule",
            peak > length / 2,
            text,
            "the rate rises for more than half of the run",
            LOOK,
        )
    decaying = [group for group in job.trainer.optimizer.param_groups if group.get("weight_decay")]
    held = {id(value) for group in decaying for value in group["params"]}
    norms = [part for part in job.model.modules() if isinstance(part, NORM_LAYERS)]
    number = len(held & {id(value) for part in norms for value in part.parameters()})
    biases = [name for name, value in named if name.endswith("bias") and id(value) in held]
    text = f"of {number} weights and biases of norms; of {len(biases)} biases in all"
    yield judge("decay", number, text, "set SOLVER.WEIGHT_DECAY_NORM 0", LOOK)

    clip = job.cfg.SOLVER.CLIP_GRADIENTS
    if not clip.ENABLED or clip.CLIP_TYPE != "full_model":
        raise NotAsked(
            "SOLVER.CLIP_GRADIENTS does not clip the norm of the whole model", "clipping"
        )
    seen = [value for value, _ in job.ordinary.storage.history("grad_norm").values()]
    number = sum(value > clip.CLIP_VALUE for value in seen)
    text = f"{clip.CLIP_VALUE:g} clips {number} of {len(seen)} steps; norms from {min(seen):.2g} to {max(seen):.2g}"
    is_bad = number == 0 or min(seen) > 10 * clip.CLIP_VALUE  # the first norms of a run are large
    yield judge("clipping", is_bad, text, "choose a value near the norms", LOOK)


@check
def settings(job: Job) -> Finding:
    """Is every setting used?"""
    known = {key for key, _ in changed_settings(get_cfg(), CfgNode())}
    changed = [key for key, _ in changed_settings(job.cfg, get_cfg()) if key not in known]
    checked = (*CONFIG_KEYS, "SOLVER.OPTIMIZER")  # their keys are errors if they are not known
    own = [key for key in changed if not any(f"{key}.".startswith(f"{name}.") for name in checked)]
    nodes = {key: key.rpartition(".")[0] for key in (*own, *reads)}
    asked = {
        nodes[key] for key in reads
    }  # of other nodes no key is asked for: they are passed on as a whole
    names = [
        key for key in own if key not in reads and (nodes[key] in asked or nodes[key] not in reads)
    ]
    text = f"of {len(own)} keys of your own, nobody reads {some(names)}"
    return judge("settings", names, text, "correct or remove them")


@check
def processes(job: Job) -> Finding:
    """Do several processes do the same as one?"""
    if comm.get_world_size() == 1 or "total_loss" not in job.ordinary.storage.latest():
        raise NotAsked("the job has one process, or stores no total_loss")
    trainer, losses = job.ordinary, job.ordinary.storage.history("total_loss").values()
    own = {
        "buffers": digest(dict(unwrap_model(trainer.model).named_buffers())),
        "metrics": {*trainer.storage.latest()},
    }
    first, *others = comm.all_gather(
        {**own, "hooks": [type(hook).__name__ for hook in trainer.hooks]}
    )
    first["metrics"] &= others[0]["metrics"]  # rank 0 also has results
    different = [name for name in first if any(each[name] != first[name] for each in others)]
    lines = map(json.loads, Path(job.start("alone"), "metrics.json").read_text().splitlines())
    alone = next(line["total_loss"] for line in lines if "total_loss" in line)
    text = f"different among them: {some(different)}; the first loss is {losses[0][0]:.4g}, of one process {alone:.4g}"
    advice = "a loss is a mean over samples; SyncBatchNorm or the hook SyncBuffers"
    return judge(
        "processes", different or abs(losses[0][0] - alone) > 0.01 * abs(alone), text, advice, LOOK
    )


def _indexed(names: Iterable[str]) -> list[Any]:
    """The datasets that have indices."""
    found = [DatasetCatalog.get(name) for name in names if name in DatasetCatalog]
    return [one for one in found if isinstance(one, Sized) and not isinstance(one, IterableDataset)]


def _facts(datasets: list[Any]) -> Iterator[tuple[list[int], str]]:
    """The class of a sample, and the digest of all but single numbers; of up to 2,000 of each dataset."""
    for dataset in datasets:
        for i in range(0, len(dataset), len(dataset) // 2000 + 1):
            sample = dataset[i]
            yield (
                classes_of(sample),
                digest([x for x in tree_leaves(sample) if not isinstance(x, int | float)]),
            )


def _drawn(images: Tensor) -> str:
    gray = nn.functional.interpolate(
        images[:4].float().nan_to_num().mean(1, keepdim=True), (8, 16)
    )[:, 0]
    levels = (
        (4 * (gray - gray.min()) / (gray.max() - gray.min()).clamp(min=1e-9)).round().int().tolist()
    )
    return "\n".join(
        "  ".join("".join("·░▒▓█"[level] for level in image[row]) for image in levels)
        for row in range(8)
    )
