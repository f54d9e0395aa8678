"""The checks: one for each part of the report, in its order; each has the name of its first finding."""

import json
import math
import os
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from timeit import timeit
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path
from torch.utils.data import ConcatDataset
from trainkit.projects.preflight.divided import READ_SEC, Draw, missing
from trainkit.projects.preflight.evaluated import (
    Answers,
    Evaluation,
    ask_model,
    confused,
    moved,
    outputs_differ,
)
from trainkit.projects.preflight.fields import Field, compare, fields_of, has_enough
from trainkit.projects.preflight.findings import LOOK, Finding, NotAsked, check, judge, some
from trainkit.projects.preflight.job import CONSTANT_RATE, EVALUATED, STEPS, Job, digest
from trainkit.projects.preflight.learned import learn_batches
from trainkit.projects.preflight.options import reads
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
from trainkit.engine.attributes import stateful_attributes
from trainkit.engine.step import parameters_of
from trainkit.solver.param_groups import NORM_LAYERS
from trainkit.testing import assert_resumes_exactly
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
    trainer = job.build(*CONSTANT_RATE)
    trainer.data_loader = job.batches[:1] * 32
    job.evaluation = job.make(trainer, 30, Evaluation)
    job.learned = trainer
    model = unwrap_model(trainer.model)
    job.own_answers = ask_model(model, job.batches[:1])
    num_of_first_pass = job.num_of_first_pass(len(job.batches))
    job.answers = ask_model(model, job.batches[1:num_of_first_pass])
    if "total_loss" not in trainer.storage.latest():
        raise NotAsked("this trainer stores no total_loss", "learns, first_loss")
    losses = [value for value, _ in trainer.storage.history("total_loss").values()]
    first = losses[0]
    last = losses[-1]
    learned_labels = classes_of(job.batches[0], ndim=1)
    constant = _loss_of_constant(learned_labels)
    text = f"the loss of one batch goes from {first:.3g} to {last:.3g} in {len(losses)} steps"
    if constant:
        text += f"; the same answer for each sample has {constant:.3g}"
    limit = min(first, constant) if constant else first
    is_learned = last < limit  # False if one of them is NaN
    advice = "try a lower SOLVER.BASE_LR; does the model see its input?"
    yield judge("learns", not is_learned, text, advice)

    classes = _classes_in(job.batches)
    if len(classes) < 2:
        raise NotAsked("no classification", "first_loss")
    if job.cfg.MODEL.WEIGHTS:
        yield Finding("first_loss", "not asked", "MODEL.WEIGHTS may know the classes already")
    else:
        ratio = first / math.log(len(classes))
        text = f"{first:.3g}, {ratio:.2g} times that of a guess among {len(classes)} classes"
        is_far = not 0.5 < ratio < 2
        yield judge("first_loss", is_far, text, "let the first outputs be small", LOOK)


def _classes_in(batches: Iterable[Any]) -> set[int]:
    classes: set[int] = set()
    for batch in batches:
        classes.update(classes_of(batch, ndim=1))
    return classes


def _loss_of_constant(labels: list[int]) -> float:
    """The cross entropy of the best answer that is the same for all samples."""
    loss = 0.0
    for number in Counter(labels).values():
        share = number / len(labels)
        loss -= share * math.log(share)
    return loss


@check
def labels(job: Job) -> Finding:
    """Do the labels belong to the inputs?"""
    classes = _classes_in(job.batches)
    if len(classes) < 2 or job.answers is None:
        raise NotAsked("no classification, the model returns no logits, or TRAIN is one batch")
    if len(job.own_answers.truth) < 4 * len(classes):
        raise NotAsked("a batch has few samples of each class")
    text = f"with one batch learned, {_right_and_chance(job.answers)}"
    if job.answers.is_above_chance(3):
        return judge("labels", False, text)
    # a model that does not know its own batch says nothing of others
    if job.own_answers.share < 0.9:
        raise NotAsked(
            f"the model knows only {job.own_answers.share:.0%} of the batch that it has learned"
        )
    if comm.get_world_size() > 1:  # all ranks would have to agree to learn more
        raise NotAsked(f"{text}; more batches are learned with one process only")
    # one batch may teach too little of a hard task
    learned = learn_batches(job, len(classes))
    text = f"with {learned.number} samples learned, {_right_and_chance(learned.answers)}"
    advice = "do they belong to the inputs? or can so few samples teach nothing?"
    return judge("labels", not learned.answers.is_above_chance(3), text, advice, LOOK)


def _right_and_chance(answers: Answers) -> str:
    return f"{answers.share:.0%} of others are right; by chance it would be {answers.chance:.0%}"


@check
def scores(job: Job) -> Finding:
    """Does the loss get what it takes?"""
    if not job.watcher.squashed:
        raise NotAsked("no cross entropy was seen in the forward pass")
    found = []
    for place, what in job.watcher.squashed.items():
        if what:
            found.append(f"the input of {place} is {what}")
    text = some(found) if found else "cross entropies get scores"
    advice = (
        "cross_entropy takes scores before softmax or sigmoid, nll_loss the logarithm of softmax"
    )
    return judge("scores", found, text, advice, LOOK)


@check
def optimizer(job: Job) -> Iterator[Finding]:
    """Does every part learn?"""
    named = dict(job.model.named_parameters())
    trained: set[int] = set()
    frozen: list[str] = []
    for name, value in named.items():
        if value.requires_grad:
            trained.add(id(value))
        else:
            frozen.append(name)
    held = {id(value) for value in parameters_of(job.trainer.optimizer, job.model)}
    num_foreign = len(held - trained)
    for attribute in stateful_attributes(job.trainer).values():
        if isinstance(attribute, Optimizer):  # as the second one of a GAN
            held |= {id(value) for value in parameters_of(attribute, job.model)}
    left_out = trained - held
    lost = [name for name, value in named.items() if id(value) in left_out]
    text = "all trained parameters are in the optimizer, and no others"
    if lost or num_foreign:
        text = f"trained, but not in the optimizer: {some(lost)}; "
        text += f"in it, but not trained: {num_foreign}"
    advice = "build it after the model is complete and frozen"
    yield judge("optimizer", lost or num_foreign, text, advice)
    yield judge("frozen", frozen, some(frozen), "unfreeze them, or allow it", LOOK)
    model = unwrap_model(job.ordinary.model)
    kinds = (_BatchNorm, nn.Dropout, type(model))
    modes = []
    for name, part in model.named_modules():
        if isinstance(part, kinds) and not part.training:
            modes.append(name or "the model")
    yield judge("modes", modes, f"in eval mode: {some(modes)}", "call train()")
    had_gradient = job.watcher.trained
    unused = [name for name in named if name not in frozen and name not in had_gradient]
    text = f"zero or missing in {STEPS} steps: {some(unused)}"
    yield judge("gradients", unused, text, "are they used in the loss?", LOOK)
    yield from _dead(job)
    yield from _norms_and_shared(job)


def _dead(job: Job) -> Iterator[Finding]:
    if not job.watcher.fired:
        yield Finding("dead", "not asked", "no ReLU was seen in the forward pass")
        return
    lines = []
    largest_share = 0.0
    for (_, place), fires in job.watcher.fired.items():
        if fires.all():
            continue
        share = (~fires).double().mean().item()
        largest_share = max(largest_share, share)
        lines.append(f"{share:.0%} of {place}")
    text = f"channels never above zero in {STEPS // 2} steps: {some(lines)}"
    advice = "lower the rate, or initialize otherwise"
    yield judge("dead", largest_share > 0.25, text, advice, LOOK)


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
    tied = []
    for names in several_names(model):
        is_declared = any(declared_as_tied(model, name) for name in names)
        if not is_declared:
            tied.append(" = ".join(names))
    if twice:
        text = f"parameters with the same memory: {some(twice)}"
        advice = "the optimizer updates it several times; share the parameter"
        yield judge("shared", True, text, advice)
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
    texts = []
    is_bad = False
    leaves_of_batches = [tree_leaves_with_path(batch) for batch in job.batches]
    for same_field in zip(*leaves_of_batches, strict=False):
        path, first = same_field[0]
        if not isinstance(first, Tensor) or first.numel() <= 1:
            continue
        of_all = torch.cat([leaf.flatten().float() for _, leaf in same_field])
        texts.append(_describe_values(keystr(path).strip("[]'"), first, of_all))
        if first.is_floating_point() and first.ndim > 1:
            std, mean = torch.std_mean(of_all)
            is_normalized = 0.02 < std < 2 and abs(mean) < 2
            is_bad |= not is_normalized
    if not texts:
        raise NotAsked("a batch has no tensors", "values, picture, repeats, augmentation")
    advice = "normalize once; find values that are not finite"
    yield judge("values", is_bad, "; ".join(texts[:6]), advice, LOOK)
    for leaf in tree_leaves(job.batches[0]):
        if isinstance(leaf, Tensor) and leaf.ndim == 4:
            yield judge("picture", False, _drawn(leaf))
            break

    digests = [digest(batch) for batch in job.batches]
    steps = []
    for step in range(1, len(digests)):
        if digests[step] == digests[step - 1]:
            steps.append(step)
    text = f"batches that equal the one before, of {len(digests)}: {some(steps)}"
    yield judge("repeats", steps, text, "shuffle the samples", LOOK)
    again = digest(job.build().fetch())
    state = digest(get_rng_state())
    names = job.cfg.DATASETS
    train = _indexed(names.TRAIN)
    names_of_others = {*names.VAL, *names.TEST}
    others = _indexed(names_of_others - {*names.TRAIN})
    is_idle = False
    if train:
        is_constant = len({digest(train[0]) for _ in range(8)}) == 1
        is_idle = is_constant and digest(get_rng_state()) != state
    text = "first batches of two runs with one seed"
    if is_idle:
        text += "; a sample draws random numbers that change nothing"
    is_other = again != digests[0]
    yield judge("augmentation", is_idle or is_other, text, "use the global random generators")
    if names_of_others and names_of_others <= {*names.TRAIN}:
        text = "all datasets of VAL and TEST are in TRAIN"
        yield judge("overlap", True, text, "evaluate on other samples", LOOK)
        raise NotAsked("VAL and TEST are TRAIN", "classes")
    yield from _divided(train, others)


def _describe_values(name: str, first: Tensor, of_all: Tensor) -> str:
    """Shape and kind of the field of one batch, and the values of all batches."""
    std, mean = torch.std_mean(of_all)
    kind = str(first.dtype).removeprefix("torch.")
    limits = f"from {of_all.min():.3g} to {of_all.max():.3g}"
    return f"{name} {[*first.shape]} {kind} {limits}, mean {mean:.2g}, std {std:.2g}"


def _divided(train: Any, others: Any) -> Iterator[Finding]:
    """Are TRAIN, and VAL and TEST, different samples of the same classes?"""
    if not train or not others:
        part = "VAL and TEST" if train else "TRAIN"
        raise NotAsked(
            f"DatasetCatalog has no dataset with indices of those in {part}", "overlap, classes"
        )
    of_others = [*read_samples(others, READ_SEC)]
    wanted = {each.content for each in of_others}
    classes_of_others: Counter[int] = Counter()
    for each in of_others:
        classes_of_others.update(each.classes)
    common: set[str] = set()
    contents: set[str] = set()  # at most two
    classes_of_train: Counter[int] = Counter()
    number = 0
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
        text = "the samples of TRAIN have nothing that tells them apart"
        yield Finding("overlap", "not asked", text)
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
        text = "in eval mode the model gives two outputs for one batch: does dropout stay on?"
        faults.append(text)
    text = "; ".join(faults) or "twice the same, and the model is as before"
    advice = "an evaluation must change nothing, and be the same again"
    yield judge("evaluates", faults, text, advice)

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
    if not train.is_above_chance(5):
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
    if not val.is_above_chance(2):
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
    faults: list[str] = []
    texts: list[str] = []
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
    whole = job.start("whole")
    again = job.start("again")
    name = "model_0000002.pth"
    text = prove_equal([read_file(whole / name)], Saved(2, True, f"{again}/{name}", {}))
    is_bad = "DIFFERENT" in text
    if is_bad:
        replay = [sys.executable, "-m", "trainkit.projects.replay", str(whole), "--iter", "0"]
        printed = job.run(*replay, "--", *job.command).stdout
        _, _, verdict = printed.rpartition("verdict: ")
        text += f"; {verdict.strip()}"
    text = f"three steps in two processes: {text}"
    return judge("reproducible", is_bad, text, "seed what draws; DETERMINISTIC on a GPU")


@check
def resumes(job: Job) -> Finding:
    """Does it resume?"""
    _check_that_it_evaluates(job)
    folder = Path(job.folder, "resumes")
    try:
        assert_resumes_exactly(job.build_trial, folder, new_processes=False)
    except AssertionError as error:
        return judge("resumes", True, str(error))
    return judge("resumes", False, "killed at three moments of six steps: every bit is the same")


@check
def host_reads(job: Job) -> Iterator[Finding]:
    """Does it wait?"""
    own = [line for line in job.watcher.reads if "site-packages" not in line]
    num_others = len(job.watcher.reads) - len(own)
    text = f"in the forward pass: {some(dict.fromkeys(own))}; {num_others} in installed packages"
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
    trainer = job.ordinary
    cfg = job.trainer.cfg
    steps = job.trainer.max_iter
    save_sec = timeit(lambda: trainer.checkpointer.save("preflight"), number=1)
    period = cfg.SOLVER.CHECKPOINT_PERIOD
    eval_period = cfg.TEST.EVAL_PERIOD
    sec_of_steps = steps * sum(job.sec.values())
    if isinstance(period, str):  # a time
        saves = int(sec_of_steps // parse_time(period, "SOLVER.CHECKPOINT_PERIOD"))
    else:
        saves = steps // period if period else 0
    evaluations = steps // eval_period if eval_period else 0
    files = Path(trainer.checkpointer.save_dir).rglob("preflight*")
    size = sum(file.stat().st_size for file in files if file.is_file())
    num_kept = min(saves, cfg.CHECKPOINT.MAX_TO_KEEP or saves) + 2
    need = size * num_kept
    place = Path(os.path.abspath(job.cfg.CHECKPOINT.DIR or job.cfg.OUTPUT_DIR))
    existing = [folder for folder in (place, *place.parents) if folder.is_dir()]
    free = shutil.disk_usage(existing[0]).free
    text = f"a checkpoint has {size / 2**20:.1f} MiB and takes {save_sec:.1f} s; "
    text += f"all need {need / 2**30:.2f} of {free / 2**30:.0f} GiB"
    yield judge("disk", need > free, text, "set CHECKPOINT.MAX_TO_KEEP")
    total = sec_of_steps + saves * save_sec
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
    most_samples = job.largest_batch(memory / peak)
    text = f"{peak / 2**20:,.0f} of {memory / 2**20:,.0f} MiB; "
    text += f"a batch can have {most_samples} samples"
    yield judge("memory", peak > 0.9 * memory, text, "make the batch smaller", LOOK)

    held = job.watcher.steps_with_tensors()
    graphs = job.watcher.steps_with_graph()
    faults: list[str] = []
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
    names_of_phase = {"val": names.VAL or names.TEST, "test": names.TEST}
    sec = dict(job.evaluation.sec)
    for phase in sec:
        done = job.evaluation.num_batches[phase]
        if not done:
            continue
        number = _num_batches(job, names_of_phase[phase])
        if number is not None:
            sec[phase] *= max(1, number / done)
    return sec


def _num_batches(job: Job, names: Iterable[str]) -> int | None:
    """The batches of a whole evaluation on these datasets; None if that is not known."""
    loaders = [job.learned.build_test_loader(job.learned.cfg, name) for name in names]
    if not all(isinstance(loader, Sized) for loader in loaders):
        return None
    number = sum(map(len, loaders))
    limit = job.cfg.TEST.MAX_BATCHES * len(loaders)
    return min(number, limit) if limit else number


@check
def schedule(job: Job) -> Iterator[Finding]:
    """Is the schedule what you think?"""
    named = job.model.named_parameters()
    if job.trainer.max_iter < 1 or not hasattr(job.trainer, "scheduler"):
        yield Finding("schedule", "not asked", "the trainer has no scheduler")
    else:
        yield from _schedule(job)
    decayed: set[int] = set()
    for group in job.trainer.optimizer.param_groups:
        if group.get("weight_decay"):
            decayed |= {id(value) for value in group["params"]}
    of_norms: set[int] = set()
    for part in job.model.modules():
        if isinstance(part, NORM_LAYERS):
            of_norms |= {id(value) for value in part.parameters()}
    number = len(decayed & of_norms)
    biases = [name for name, value in named if name.endswith("bias") and id(value) in decayed]
    text = f"of {number} weights and biases of norms; of {len(biases)} biases in all"
    advice = "set SOLVER.WEIGHT_DECAY_NORM 0"
    if not job.trainer.is_default("build_optimizer"):
        advice = "give them a parameter group without decay in build_optimizer"
    yield judge("decay", number, text, advice, LOOK)

    clip = job.cfg.SOLVER.CLIP_GRADIENTS
    if not clip.ENABLED or clip.CLIP_TYPE != "full_model":
        reason = "SOLVER.CLIP_GRADIENTS does not clip the norm of the whole model"
        raise NotAsked(reason, "clipping")
    norms = [value for value, _ in job.ordinary.storage.history("grad_norm").values()]
    number = sum(norm > clip.CLIP_VALUE for norm in norms)
    text = f"{clip.CLIP_VALUE:g} clips {number} of {len(norms)} steps; "
    text += f"norms from {min(norms):.2g} to {max(norms):.2g}"
    is_bad = number == 0 or min(norms) > 10 * clip.CLIP_VALUE  # the first norms of a run are large
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
    # of other nodes no key is asked for: they are passed on as a whole
    nodes_with_reads = {_node_of(key) for key in reads}
    unread = []
    for key in own:
        node = _node_of(key)
        is_passed_on = node in reads and node not in nodes_with_reads
        if key not in reads and not is_passed_on:
            unread.append(key)
    text = "every key of your own is read"
    if unread:
        text = f"of {len(own)} keys of your own, these are not read: {some(unread)}"
    return judge("settings", unread, text, "correct or remove them")


def _node_of(key: str) -> str:
    """``A.B`` of ``A.B.C``; "" of ``A``."""
    node, _, _ = key.rpartition(".")
    return node


@check
def processes(job: Job) -> Finding:
    """Do several processes do the same as one?"""
    trainer = job.ordinary
    if comm.get_world_size() == 1:
        raise NotAsked("the job has one process")
    if "total_loss" not in trainer.storage.latest():
        raise NotAsked("this trainer stores no total_loss")
    own = {
        "buffers": digest(dict(unwrap_model(trainer.model).named_buffers())),
        "metrics": {*trainer.storage.latest()},
        "hooks": [type(hook).__name__ for hook in trainer.hooks],
    }
    first, *others = comm.all_gather(own)
    first["metrics"] &= others[0]["metrics"]  # rank 0 also has results
    different = []
    for name in first:
        if any(each[name] != first[name] for each in others):
            different.append(name)
    first_loss, _ = trainer.storage.history("total_loss").values()[0]
    alone = _first_loss(Path(job.start("alone"), "metrics.json"))
    is_other = abs(first_loss - alone) > 0.01 * abs(alone)
    text = f"different among them: {some(different)}; "
    text += f"the first loss is {first_loss:.4g}, of one process {alone:.4g}"
    advice = "a loss is a mean over samples; SyncBatchNorm or the hook SyncBuffers"
    return judge("processes", different or is_other, text, advice, LOOK)


def _first_loss(metrics_file: Path) -> float:
    for line in metrics_file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "total_loss" in row:
            return float(row["total_loss"])
    raise RuntimeError(f"{metrics_file} has no total_loss")


def _indexed(names: Iterable[str]) -> Any:
    """The datasets that have indices, as one."""
    found = [DatasetCatalog.get(name) for name in names if name in DatasetCatalog]
    datasets = [dataset for dataset in found if has_indices(dataset) and len(dataset)]
    return ConcatDataset(datasets) if datasets else ()


def _drawn(images: Tensor) -> str:
    """The first four images side by side, each in 8 rows of 16 characters."""
    gray = images[:4].float().nan_to_num().mean(1, keepdim=True)
    small = nn.functional.interpolate(gray, (8, 16))[:, 0]
    darkest = small.min()
    contrast = (small.max() - darkest).clamp(min=1e-9)
    levels = (4 * (small - darkest) / contrast).round().int().tolist()
    lines = []
    for row in range(8):
        parts = ["".join("·░▒▓█"[level] for level in image[row]) for image in levels]
        lines.append("  ".join(parts))
    return "\n".join(lines)
