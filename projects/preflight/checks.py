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
from torch.utils.data import ConcatDataset
from trainkit.projects.preflight.divided import READ_SEC, Draw, missing
from trainkit.projects.preflight.evaluated import (
    Evaluation,
    ask_model,
    confused,
    moved,
    outputs_differ,
)
from trainkit.projects.preflight.fields import Field, compare, fields_of, has_enough
from trainkit.projects.preflight.findings import LOOK, Finding, NotAsked, check, judge, some
from trainkit.projects.preflight.job import EVALUATED, STEPS, Job, digest
from trainkit.projects.preflight.options import KILLED, reads
from trainkit.projects.preflight.rates import ends_early, first_rates, never_come, rates_of
from trainkit.projects.preflight.samples import (
    classes_of,
    draw_batches,
    has_indices,
    is_random,
    read_samples,
)
from trainkit.projects.preflight.shared import declared_as_tied, same_memory, several_names
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
    trainer.data_loader = job.batches[:1] * 32
    job.evaluation = job.make(trainer, 30, Evaluation)
    job.learned = trainer
    job.answers = ask_model(unwrap_model(trainer.model), job.batches[1:])
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
    if job.cfg.MODEL.WEIGHTS:
        yield Finding("first_loss", "not asked", "MODEL.WEIGHTS may know the classes already")
    else:
        ratio = losses[0] / math.log(len(classes))
        text = f"{losses[0]:.3g}, {ratio:.2g} times that of a guess among {len(classes)} classes"
        is_far = not 0.5 < ratio < 2
        yield judge("first_loss", is_far, text, "let the first outputs be small", LOOK)

    if len(known) < 4 * len(classes) or job.answers is None:
        raise NotAsked(
            "a batch has few samples of each class, or the model returns no logits", "labels"
        )
    text = f"with one batch learned, {job.answers.share:.0%} of others are right"
    text += f"; by chance it would be {job.answers.chance:.0%}"
    yield judge("labels", job.answers.is_guessed, text, "do they belong to the inputs?")


@check
def scores(job: Job) -> Finding:
    """Does the loss get what it takes?"""
    if not job.watcher.squashed:
        raise NotAsked("no cross entropy was seen in the forward pass")
    found = [
        f"the input of {place} is {what}" for place, what in job.watcher.squashed.items() if what
    ]
    text = some(found) if found else "cross entropies get scores"
    advice = (
        "cross_entropy takes scores before softmax or sigmoid, nll_loss the logarithm of softmax"
    )
    return judge("scores", found, text, advice, LOOK)


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
    yield from _dead(job)
    yield from _norms_and_shared(job)


def _dead(job: Job) -> Iterator[Finding]:
    if not job.watcher.fired:
        yield Finding("dead", "not asked", "no ReLU was seen in the forward pass")
        return
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


def _norms_and_shared(job: Job) -> Iterator[Finding]:
    if not job.watcher.smallest:
        yield Finding("batch_norm", "not asked", "no batch norm is trained")
    else:
        alone = [name for name, number in job.watcher.smallest.items() if number == 1]
        rest = _last_batch(job.trainer.data_loader)
        text = f"with one sample: {some(alone)}"
        if rest == 1:
            text += "; the last batch of each pass has one"
        advice = "larger batches, drop_last, or another norm"
        yield judge("batch_norm", alone or rest == 1, text, advice, LOOK)

    model = job.model
    twice = [" = ".join(names) for names in same_memory(model)]
    tied = [
        " = ".join(names)
        for names in several_names(model)
        if not any(declared_as_tied(model, name) for name in names)
    ]
    if twice:
        text = f"parameters with the same memory: {some(twice)}"
        yield judge(
            "shared", True, text, "the optimizer updates it several times; share the parameter"
        )
    else:
        text = f"parameters of several modules: {some(tied)}"
        advice = (
            "a list [layer] * 6 has one layer; if it is intended, name them in _tied_weights_keys"
        )
        yield judge("shared", tied, text, advice, LOOK)


def _last_batch(loader: Any) -> int | None:
    """The number of samples in the last batch of a pass, if it is smaller; None if that is not known."""
    size = getattr(loader, "batch_size", None)
    sampler = getattr(loader, "sampler", None)
    if not size or not isinstance(sampler, Sized) or getattr(loader, "drop_last", True):
        return None
    try:
        return len(sampler) % size
    except TypeError:  # it is endless
        return None


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
    if not texts:
        raise NotAsked("a batch has no tensors", "values, picture, repeats, augmentation")
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
    train = _indexed(names.TRAIN)
    names_of_others = {*names.VAL, *names.TEST}
    others = _indexed(names_of_others - {*names.TRAIN})
    is_idle = bool(train) and len({digest(train[0]) for _ in range(8)}) == 1
    is_idle = is_idle and digest(get_rng_state()) != state
    text = (
        "first batches of two runs with one seed"
        + "; a sample draws random numbers that change nothing" * is_idle
    )
    yield judge(
        "augmentation", is_idle or again != digests[0], text, "use the global random generators"
    )
    if names_of_others and names_of_others <= {*names.TRAIN}:
        text = "all datasets of VAL and TEST are in TRAIN"
        yield judge("overlap", True, text, "evaluate on other samples", LOOK)
        raise NotAsked("VAL and TEST are TRAIN", "classes")
    yield from _divided(train, others)


def _divided(train: Any, others: Any) -> Iterator[Finding]:
    """Are TRAIN, and VAL and TEST, different samples of the same classes?"""
    if not train or not others:
        raise NotAsked("no datasets with indices", "overlap, classes")
    of_others = [*read_samples(others, READ_SEC)]
    wanted = {each.content for each in of_others}
    classes_of_others = Counter(label for each in of_others for label in each.classes)
    common, contents, classes_of_train, number = set[str](), set[str](), Counter[int](), 0
    for each in read_samples(train, READ_SEC):
        number += 1
        classes_of_train.update(each.classes)
        if each.content in wanted:
            common.add(each.content)
        if len(contents) < 2:
            contents.add(each.content)
    if classes_of_others and not classes_of_train:
        raise NotAsked("TRAIN has no labels, but VAL and TEST have", "overlap, classes")

    found = sum(each.content in common for each in of_others)
    draw = Draw(number, len(train), len(of_others))
    if is_random(train) or is_random(others):
        text = "a sample of TRAIN, VAL or TEST is random: one index gives different contents"
        yield Finding("overlap", "not asked", text)
    elif len(contents) < 2:
        yield Finding(
            "overlap", "not asked", "the samples of TRAIN have nothing that tells them apart"
        )
    elif draw.smallest_leak > 1:
        text = f"in {READ_SEC:.0f} s only {number} of {len(train)} samples of TRAIN could be read"
        yield Finding("overlap", "not asked", text)
    else:
        text = f"{found} of {len(of_others)} samples of VAL and TEST are among {number} of TRAIN"
        if number < len(train):
            text += f", which has {len(train)}: a leak of {draw.smallest_leak:.0%} would be found"
        yield judge("overlap", found > draw.limit, text, "divide the data before anything else")

    if classes_of_others:
        only_train = missing(classes_of_train, classes_of_others, len(of_others) == len(others))
        only_others = missing(classes_of_others, classes_of_train, number == len(train))
        text = f"only in TRAIN: {some(only_train)}; not in it: {some(only_others)}"
        if number < len(train) or len(of_others) < len(others):
            text += f", of {number} and {len(of_others)} random samples"
        is_bad = only_train or only_others
        yield judge("classes", is_bad, text, "divide each class in the same way", LOOK)
    else:
        yield Finding("classes", "not asked", "VAL and TEST have no labels")


@check
def evaluates(job: Job) -> Iterator[Finding]:
    """Is it evaluated as it is trained?"""
    every = "evaluates, val_labels, val_inputs"
    evaluation = job.evaluation
    if evaluation is None:
        raise NotAsked("the job could not learn one batch", every)
    if not evaluation.phases:
        raise NotAsked("the job has no hook that evaluates", every)
    if evaluation.error:
        text = f"with up to {EVALUATED} batches: {evaluation.error}"
        yield judge("evaluates", True, text, "the evaluation has to run")
        raise NotAsked("the evaluation fails", "val_labels, val_inputs")
    model = unwrap_model(job.learned.model)
    batches, reason = _val_batches(job, model)
    faults = [f"it changes {name} of the model" for name in evaluation.changed]
    if evaluation.different:
        faults.append(f"a second evaluation gives other values of {some(evaluation.different)}")
    if batches and outputs_differ(model, batches[0]):
        faults.append(
            "in eval mode the model gives two outputs for one batch: does dropout stay on?"
        )
    text = "; ".join(faults) or "twice the same, and the model is as before"
    yield judge(
        "evaluates", faults, text, "an evaluation must change nothing, and be the same again"
    )

    if not batches:
        raise NotAsked(reason, "val_labels, val_inputs")
    yield _val_labels(job.answers, ask_model(model, batches))
    yield _val_inputs(fields_of(job.batches), fields_of(batches))


def _val_batches(job: Job, model: nn.Module) -> tuple[list[Any], str]:
    """Random samples of the first dataset of VAL, on the device; or none, with the reason."""
    names = job.cfg.DATASETS.VAL or job.cfg.DATASETS.TEST
    if not names:
        return [], "DATASETS.VAL and TEST are empty"
    number = min(max(64, 8 * job.cfg.SOLVER.IMS_PER_BATCH), 512)
    try:
        loader = job.learned.build_test_loader(job.learned.cfg, names[0])
        return moved(draw_batches(loader, number), model), "the loader of VAL gives no batch"
    except Exception as error:  # the evaluation works, so it has its own loader
        return [], f"build_test_loader gives no batches: {type(error).__name__}: {error}"[:200]


def _val_labels(train: Any, val: Any) -> Finding:
    if train is None or val is None:
        return Finding("val_labels", "not asked", "no classification")
    if not train.is_known:
        text = "with one batch learned, the model knows too little of others in TRAIN"
        return Finding("val_labels", "not asked", text)
    if train.share < val.chance + 5 * val.error:
        text = f"{len(val.truth)} samples of VAL are too few, or most have one class"
        return Finding("val_labels", "not asked", text)
    text = (
        f"with one batch learned, {train.share:.0%} are right in TRAIN and {val.share:.0%} in VAL"
    )
    text += f"; by chance it would be {val.chance:.0%}"
    advice = "do its labels belong to its inputs, with the same numbers of classes?"
    if val.is_guessed:
        return judge("val_labels", True, text, advice)
    classes = [*confused(train, val)]
    if classes:
        text += f"; {some(classes)}"
    is_worse = val.share < 0.75 * train.share - 3 * val.error
    return judge("val_labels", classes or is_worse, text, advice, LOOK)


def _val_inputs(train: dict[str, Field], val: dict[str, Field]) -> Finding:
    common = [name for name in train if name in val and has_enough(val[name])]
    if not common:
        text = "TRAIN and VAL share no input of real numbers, or VAL has fewer than 8 samples"
        return Finding("val_inputs", "not asked", text)
    faults, texts = list[str](), list[str]()
    for name in common:
        found = [*compare(train[name], val[name])]
        faults += found
        text = f"{name} in TRAIN: {train[name].describe()}, in VAL: {val[name].describe()}"
        texts.append("; ".join([text, *found]))
    advice = "normalize both in the same way, with the same order of channels"
    return judge("val_inputs", faults, "; ".join(texts[:4]), advice, LOOK)


def _check_that_it_evaluates(job: Job) -> None:
    if job.evaluation is not None and job.evaluation.error:
        raise NotAsked("the evaluation fails, and ends the new processes")


@check
def reproducible(job: Job) -> Finding:
    """Is it reproducible?"""
    _check_that_it_evaluates(job)
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
    _check_that_it_evaluates(job)
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
    total = steps * sum(job.sec.values()) + saves * save_sec
    sec = _sec_of_evaluations(job)
    if sec:
        first = sec.get("val", 0.0)
        total += evaluations * first + sec.get("test", first)
        text = f"about {total / 60:.1f} min; an evaluation takes {first:.1f} s"
    else:
        text = f"about {total / 60:.1f} min without evaluations"
    yield judge("time", False, text)

    peak = 2**10 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if accelerator_runs_ahead():
        peak = torch.accelerator.memory.max_memory_allocated()
        memory = torch.get_device_module().get_device_properties().total_memory
    text = f"{peak / 2**20:,.0f} of {memory / 2**20:,.0f} MiB; a batch can have {job.largest_batch(memory / peak)}"
    yield judge("memory", peak > 0.9 * memory, f"{text} samples", "make the batch smaller", LOOK)

    held = job.watcher.steps_with_tensors()
    graphs = job.watcher.steps_with_graph()
    faults = list[str]()
    if graphs > STEPS // 2:
        faults.append(f"the graphs of {graphs} steps are still there")
    if len(held) > max(3, len(job.watcher.watched) // 2):
        size = sum(held.values()) / len(held)
        faults.append(f"each step leaves {size / 2**10:.1f} KiB of tensors of its forward pass")
    text = "; ".join(faults) or "nothing of earlier steps is left"
    yield judge("growth", faults, text, "detach what you keep, and keep no list of it")


def _sec_of_evaluations(job: Job) -> dict[str, float]:
    """Phase -> seconds of a whole evaluation; those of some batches are multiplied."""
    if job.evaluation is None or job.evaluation.error:
        return {}
    names = job.cfg.DATASETS
    sec = dict(job.evaluation.sec)
    for phase, of_phase in (("val", names.VAL or names.TEST), ("test", names.TEST)):
        done = job.evaluation.num_batches[phase]
        if phase in sec and done:
            loaders = [job.learned.build_test_loader(job.learned.cfg, name) for name in of_phase]
            if all(isinstance(loader, Sized) for loader in loaders):
                number = sum(map(len, loaders))
                limit = job.cfg.TEST.MAX_BATCHES * len(loaders)
                sec[phase] *= max(1, (min(number, limit) if limit else number) / done)
    return sec


@check
def schedule(job: Job) -> Iterator[Finding]:
    """Is the schedule what you think?"""
    named = job.model.named_parameters()
    if job.trainer.max_iter < 1 or not hasattr(job.trainer, "scheduler"):
        yield Finding("schedule", "not asked", "the trainer has no scheduler")
    else:
        yield from _schedule(job)
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


def _schedule(job: Job) -> Iterator[Finding]:
    trainer = job.build()
    length = job.trainer.max_iter
    try:
        rates = rates_of(trainer, length)
    except NotAsked as error:
        yield Finding("schedule", "not asked", error.args[0])
        return
    peak = max(rates, key=rates.__getitem__)
    faults = [ends_early(rates), never_come(job.trainer.cfg, trainer.scheduler, rates)]
    if peak > length / 2:
        faults.append("the rate rises for more than half of the run")
    faults = [fault for fault in faults if fault]
    text = "; ".join([first_rates(rates), *faults])
    yield judge("schedule", faults, text, "give lengths in parts of SOLVER.MAX_ITER", LOOK)


@check
def settings(job: Job) -> Finding:
    """Is every setting used?"""
    known = {key for key, _ in changed_settings(get_cfg(), CfgNode())}
    changed = [key for key, _ in changed_settings(job.cfg, get_cfg()) if key not in known]
    # the optimizer refuses an argument that it does not know
    own = [key for key in changed if not key.startswith("SOLVER.OPTIMIZER.")]
    nodes = {key: key.rpartition(".")[0] for key in (*own, *reads)}
    # of other nodes no key is asked for: they are passed on as a whole
    asked = {nodes[key] for key in reads}
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


def _indexed(names: Iterable[str]) -> Any:
    """The datasets that have indices, as one."""
    found = [DatasetCatalog.get(name) for name in names if name in DatasetCatalog]
    datasets = [dataset for dataset in found if has_indices(dataset) and len(dataset)]
    return ConcatDataset(datasets) if datasets else ()


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
