"""The questions, in the order of the report; yours: a function ``check(job) -> Finding`` registered by `check`."""

import hashlib
import itertools
import math
import os
import pickle
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from trainkit.projects.preflight.findings import Finding, check, judge, not_asked, some
from trainkit.projects.preflight.host_reads import HostReads
from trainkit.projects.preflight.job import STEPS, Job
from trainkit.projects.preflight.reads import reads

from trainkit.config import CfgNode, get_cfg
from trainkit.config.config import changed_settings
from trainkit.data import DatasetCatalog
from trainkit.utils.device import device_of
from trainkit.utils.events import EventStorage
from trainkit.utils.plugins import CONFIG_KEYS

WITH_PROCESSES = ("reproducible", "resumes")
LOOK = "look at this"


@check
def runs(job: Job) -> Finding:
    return judge(not job.ordinary, f"{STEPS} steps of {job.trainer.max_iter}")


@check
def learns(job: Job) -> Finding:
    losses, labels = job.one_batch[1].losses, _labels(job.ordinary[1].batches[:1])
    # the cross entropy of the best answer that is the same for all samples
    constant = -sum(n / len(labels) * math.log(n / len(labels)) for n in Counter(labels).values())
    text = f"the loss of one batch goes from {losses[0]:.3g} to {losses[-1]:.3g} in {len(losses)} steps"
    text += f"; the same answer for each sample has {constant:.3g}" if constant else ""
    is_bad = not losses[-1] < min(losses[0], constant or math.inf)
    return judge(is_bad, text, "try a lower SOLVER.BASE_LR; does the model see its input?")


@check
def labels(job: Job) -> Finding:
    trainer, batches = job.one_batch[0], job.ordinary[1].batches
    classes, known = _labels(batches), _labels(batches[:1])
    if len(known) < 4 * len({*classes}) or len(classes) == len(known):
        return not_asked("no classification, or a batch has few samples of each class")
    model = trainer.model.eval()
    with torch.no_grad():
        outputs = [model(_on_device(batch, model)) for batch in batches[1:]]
    if not all(isinstance(output, Tensor) and output.ndim == 2 for output in outputs):
        return not_asked("the model returns no logits")
    answers = torch.cat(outputs).argmax(1).tolist()
    number, chance = len(answers), max(Counter(classes).values()) / len(classes)
    share = sum(a == b for a, b in zip(answers, classes[len(known) :], strict=True)) / number
    text = f"with one batch learned, {share:.0%} of others are right; the most frequent class has {chance:.0%}"
    return judge(share <= chance + 2 * math.sqrt(chance / number), text, "do the labels belong to their inputs?")


@check
def gradients(job: Job) -> Finding:
    names = [*job.ordinary[1].unused]
    return judge(names, f"always zero or missing: {some(names)}", "are they used in the loss?")


@check
def optimizer(job: Job) -> Finding:
    model = {id(value): name for name, value in job.model.named_parameters() if value.requires_grad}
    held = {id(value) for group in job.trainer.optimizer.param_groups for value in group["params"]}
    text = f"trained, but not in it: {some([name for key, name in model.items() if key not in held])}"
    text += f"; in it, but not trained: {len(held - model.keys())}"
    return judge(held != model.keys(), text, "build it after the model is complete and frozen")


@check
def frozen(job: Job) -> Finding:
    names = [name for name, value in job.model.named_parameters() if not value.requires_grad]
    return judge(names, some(names), "unfreeze them, or allow it", LOOK)


@check
def modes(job: Job) -> Finding:
    return judge(job.ordinary[1].evaluating, f"in eval mode: {some([*job.ordinary[1].evaluating])}", "call train()")


@check
def values(job: Job) -> Finding:
    texts, is_bad = [], False
    for name, tensors in _inputs(job.ordinary[1].batches):
        joined = torch.cat([tensor.flatten().float() for tensor in tensors])
        mean, std = joined.mean().item(), joined.std().item()
        texts.append(f"{name} {[*tensors[0].shape]} has mean {mean:.2g} and std {std:.2g}")
        is_bad = is_bad or not (0.02 < std < 2 and abs(mean) < 2)
    return judge(is_bad, "; ".join(texts), "normalize once, not twice; find values that are not finite", LOOK)


@check
def overlap(job: Job) -> Finding:
    names = job.cfg.DATASETS
    of_train, of_others = names.TRAIN, {*names.VAL, *names.TEST} - {*names.TRAIN}
    if _fields(of_train) < _fields(of_others):
        return not_asked("TRAIN has fewer fields than VAL and TEST: it has no labels")
    train, others = {*_digests(of_train)}, [*_digests(of_others)]
    common = sum(digest in train for digest in others)
    text = f"{common} of {len(others)} samples of VAL and TEST are among {len(train)} of TRAIN"
    return judge(common > len(others) / 100, text, "divide the data before anything else")


@check
def augmentation(job: Job) -> Finding:
    one, other = (_digest(next(iter(job.build().data_loader))) for _ in range(2))
    return judge(one != other, "first batches of two runs with one seed", "use the global random generators")


@check
def reproducible(job: Job) -> Finding:
    names = _differences(job.whole, job.start(6))
    return judge(names, f"other bits in a second process: {some(names)}", "seed what draws; DETERMINISTIC on a GPU")


@check
def resumes(job: Job) -> Finding:
    killed = Path(shutil.copytree(job.whole, f"{job.whole}_killed"))  # after the checkpoint of iteration 2
    for name in ("model_final.pth", "finished"):
        (killed / name).unlink()
    (killed / "last_checkpoint").write_text("model_0000002.pth")
    job.start(6, "OUTPUT_DIR", killed, "--resume")
    names, lost = _differences(job.whole, killed), "; ".join(job.ordinary[0].describe_inexact())
    return judge(names, f"other bits after a kill: {some(names)}", lost or "give what has a state a state_dict")


@check
def host_reads(job: Job) -> Finding:
    trainer, probe = job.ordinary
    with EventStorage(), HostReads() as reader:
        trainer.compute_losses(_on_device(probe.batches[0], trainer.model))
    own = [line for line in reader.lines if "site-packages" not in line]
    text = f"in the forward pass: {some(own)}; {len(reader.lines) - len(own)} reads in installed packages"
    return judge(own, text, "the device would wait; keep it a tensor", LOOK)


@check
def loader(job: Job) -> Finding:
    sec, batches = dict(job.ordinary[1].sec), iter(job.build().data_loader)
    next(batches)  # starts the workers
    started = time.perf_counter()
    number = sum(1 for _ in itertools.islice(batches, STEPS))
    alone, step = (time.perf_counter() - started) / max(1, number), sec.pop("step") / STEPS
    shares = ", ".join(f"{name} {part / STEPS / step:.0%}" for name, part in sec.items())
    text = f"a step has {1000 * step:.1f} ms ({shares}), a batch alone {1000 * alone:.1f} ms"
    workers = math.ceil(max(1, job.cfg.DATALOADER.NUM_WORKERS) * alone / step)
    return judge(alone > max(step, 0.02), text, f"{workers} workers would suffice", LOOK)


@check
def fits(job: Job) -> Finding:
    trainer, cfg, steps = job.ordinary[0], job.trainer.cfg, job.trainer.max_iter
    save_sec = _seconds(lambda: trainer.checkpointer.save("preflight"))
    eval_sec = _seconds(lambda: job.trainer.test(cfg, job.trainer.model))
    periods = cfg.SOLVER.CHECKPOINT_PERIOD, cfg.TEST.EVAL_PERIOD
    saves, evaluations = (steps // period if period else 0 for period in periods)
    files = Path(trainer.checkpointer.save_dir).rglob("preflight*")
    size = sum(file.stat().st_size for file in files if file.is_file())
    need = size * (min(saves, cfg.CHECKPOINT.MAX_TO_KEEP or saves) + 2)
    place = Path(os.path.abspath(job.cfg.CHECKPOINT.DIR or job.cfg.OUTPUT_DIR))
    free = shutil.disk_usage(next(folder for folder in (place, *place.parents) if folder.is_dir())).free
    total = job.ordinary[1].sec["step"] / STEPS * steps + saves * save_sec + (evaluations + 1) * eval_sec
    text = f"about {total / 60:.1f} min; checkpoints of {size / 2**20:.1f} MiB need {need / 2**30:.2f} of "
    text += f"{free / 2**30:.0f} GiB; an evaluation takes {eval_sec:.1f} s"
    if torch.cuda.is_available():
        text += f"; {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB on the GPU"
    return judge(need > free, text, "set CHECKPOINT.MAX_TO_KEEP")


@check
def schedule(job: Job) -> Finding:
    if not hasattr(scheduler := job.trainer.scheduler, "schedule"):
        return not_asked("a scheduler of another kind")
    length, base = job.trainer.max_iter, scheduler.base_lrs[0]
    rates = {at: scheduler.schedule(at, base) for at in range(0, length, max(1, length // 30))}
    at = max(rates, key=rates.__getitem__)
    bars = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * rate / (rates[at] or 1)))] for rate in rates.values())
    text = f"{bars} from {rates[0]:.2g} to {rates[at]:.2g} at {at}, then {[*rates.values()][-1]:.2g}"
    return judge(at > length / 2, text, "the rate rises for more than half of the run", LOOK)


@check
def settings(job: Job) -> Finding:
    known = {key for key, _ in changed_settings(get_cfg(), CfgNode())}
    changed = [key for key, _ in changed_settings(job.cfg, get_cfg()) if key not in known]
    checked = (*CONFIG_KEYS, "SOLVER.OPTIMIZER")  # their keys are errors if they are not known
    own = [key for key in changed if not any(f"{key}.".startswith(f"{name}.") for name in checked)]
    names = [key for key in own if key not in reads]
    return judge(names, f"of {len(own)} keys of your own, nobody reads {some(names)}", "correct or remove them")


# ---------------------------------------------------------------------- helpers


def _on_device(batch: Any, model: nn.Module) -> Any:
    return tree_map_only(Tensor, lambda value: value.to(device_of(model)), batch)


def _inputs(batches: list[Any]) -> Iterator[tuple[str, list[Tensor]]]:
    """The floating point fields of batches, by name."""
    first = batches[0]
    for name in first if isinstance(first, dict) else range(len(first)) if isinstance(first, list | tuple) else ():
        if isinstance(first[name], Tensor) and first[name].is_floating_point() and first[name].ndim > 1:
            yield str(name), [batch[name] for batch in batches]


def _labels(batches: list[Any]) -> list[int]:
    """The classes of all samples; none if batches have no label for each sample."""
    found: list[Any] = [batch.get("label", batch.get("labels")) for batch in batches if isinstance(batch, dict)]
    found += [batch[1] for batch in batches if isinstance(batch, list | tuple) and len(batch) == 2]
    are_classes = [isinstance(each, Tensor) and each.ndim == 1 and not each.is_floating_point() for each in found]
    return [int(label) for each in found for label in each] if all(are_classes) else []


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _digest(value: Any) -> str:
    leaves = [
        leaf.cpu().numpy().tobytes() if isinstance(leaf, Tensor) else pickle.dumps(leaf) for leaf in tree_leaves(value)
    ]
    return hashlib.sha256(b"".join(leaves)).hexdigest()


def _samples(names: Iterable[str]) -> Iterator[Any]:
    """Up to 2,000 samples of each dataset that has indices."""
    for name in names:
        dataset: Any = DatasetCatalog.get(name) if name in DatasetCatalog else None
        yield from (dataset[i] for i in range(min(2000, len(dataset)) if hasattr(dataset, "__getitem__") else 0))


def _digests(names: Iterable[str]) -> Iterator[str]:
    """Of samples without single numbers, such as a label."""
    for sample in _samples(names):
        yield _digest([leaf for leaf in tree_leaves(sample) if not isinstance(leaf, int | float)])


def _fields(names: Iterable[str]) -> set[str]:
    """Of the first sample, if it is a dict; without its number."""
    sample = next(_samples(names), None)
    return {*sample} - {"index", "id"} if isinstance(sample, dict) else set()


def _differences(one: Path, other: Path) -> list[str]:
    """Names in the models of two runs that differ."""
    first, second = (torch.load(folder / "model_final.pth", weights_only=True)["model"] for folder in (one, other))
    return [name for name in first if not torch.equal(first[name], second[name])]
