"""What a run did: the calls of its hook points, its batches, losses and random numbers.

A spy runs before all other hooks and one after them. They note each call, and keep the folder of
the run as it is at some of the calls: a kill at this moment would leave it so.
"""

import contextlib
import hashlib
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from yacs.config import CfgNode

from trainkit.checkpoint.differences import bytes_of
from trainkit.engine.defaults.trainer import DefaultTrainer
from trainkit.engine.hook_base import EPOCH_POINTS, HOOK_POINTS, HookBase
from trainkit.engine.loop import TrainerBase
from trainkit.utils import comm
from trainkit.utils.env import get_rng_state, seed_all_rng

# a resumed run may make these calls once more
REPEATED = ("before_train", "after_load", "before_save")
# the spies draw a random number at these points; a resumed run may call the others again
DRAWING = ("before_epoch", "before_step", "after_backward", "after_step", "after_epoch")


class Call(NamedTuple):
    """One call of a spy.

    Attributes:
        spy: "first" or "last".
        words: the arguments of the call that are texts or numbers.
        batch: a digest of ``trainer.batch``.
        losses: ``trainer.losses``, as text.
        drawn: a random number of the global generators.
    """

    spy: str
    point: str
    iteration: int
    words: tuple[Any, ...] = ()
    batch: str = ""
    losses: str = ""
    drawn: float | None = None

    def __str__(self) -> str:
        where = "before" if self.spy == "first" else "after"
        words = "".join(f", {word}" for word in self.words)
        return f"{self.point}{words} of iteration {self.iteration}, {where} all other hooks"


Attributes = dict[str, str]
"""Object and attribute, such as "Counter.count" -> its value as text."""


@dataclass
class Record:
    """What a run did.

    Attributes:
        calls: those of the spies.
        attributes: of the user's hooks and trainer, at each of the calls.
        starts: a digest of the random state, and the attributes, before and after ``before_train``
            of all other hooks.
        before: the number of calls before the checkpoint with which the run went on, without those
            that are repeated; None: the run started anew.
        inexact: the reasons that the trainer gives, see ``describe_inexact``.
        saves_early: whether there was a checkpoint before the last iteration; known with a keeper.
    """

    calls: list[Call] = field(default_factory=list)
    attributes: list[Attributes] = field(default_factory=list)
    starts: list[tuple[str, Attributes]] = field(default_factory=list)
    before: int | None = None
    inexact: list[str] = field(default_factory=list)
    saves_early: bool = False

    def once(self) -> list[tuple[Call, Attributes]]:
        """The calls that a resumed run must make as the whole one does."""
        both = zip(self.calls, self.attributes, strict=True)
        return [(call, attributes) for call, attributes in both if call.point not in REPEATED]

    def drawn_at_start(self) -> set[str]:
        """The attributes that ``before_train`` has changed, if it has drawn random numbers."""
        (state, attributes), (later_state, later_attributes) = self.starts[:2]
        if state == later_state:
            return set()
        changed = later_attributes.items() - attributes.items()
        return {name for name, _ in changed}


class Keeper:
    """Keeps the folder of a run as it is at some calls, each of which is as likely as any other.

    Args:
        target: the folder for the copies; their names are the numbers of the calls.
        number: how many; None: one of each call.
        seed: draws the calls.
    """

    def __init__(self, folder: Path, target: Path, number: int | None, seed: int) -> None:
        self._folder, self._target = folder, target
        self._number = number
        self._rng = random.Random(seed)
        self._num_seen = 0
        self._kept: list[Path] = []

    def see(self, call: int) -> bool:
        """Keep the folder now, or do not; returns whether the run has a checkpoint to resume from."""
        if next(self._folder.rglob("last_checkpoint"), None) is None:
            return False
        self._num_seen += 1
        copy = self._target / str(call)
        if self._number is None or len(self._kept) < self._number:
            self._kept.append(copy)
            copy_folder(self._folder, copy)
            return True
        # after n calls each of them is kept with the probability number / n
        place = self._rng.randrange(self._num_seen)
        if place < self._number:
            shutil.rmtree(self._kept[place])
            self._kept[place] = copy
            copy_folder(self._folder, copy)
        return True


def copy_folder(folder: Path, target: Path) -> None:
    """Copy a folder in which a thread may write meanwhile."""
    target.mkdir(parents=True)
    files = [path for path in folder.rglob("*") if path.is_file()]
    # the copy must not name a checkpoint that was written after the others were copied
    for file in sorted(files, key=lambda file: file.name != "last_checkpoint"):
        if file.name == "run.lock":
            continue
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a temporary file that is renamed
            shutil.copy(file, copy)


class Spy(HookBase):
    """Notes each call of a hook point."""

    def __init__(self, name: str, record: Record, keeper: Keeper | None, has_epochs: bool) -> None:
        self._name = name
        self._record = record
        self._keeper = keeper
        self.before: int | None = None
        for point in HOOK_POINTS:
            if has_epochs or point not in EPOCH_POINTS:
                setattr(self, point, self._noting(point))

    def _noting(self, point: str) -> Callable[..., None]:
        def note(*arguments: Any) -> None:
            self._note(point, arguments)

        return note

    def _note(self, point: str, arguments: tuple[Any, ...]) -> None:
        if self._keeper is not None and comm.is_main_process():
            has_checkpoint = self._keeper.see(len(self._record.calls))
            is_early = self.trainer.iter + 1 < self.trainer.max_iter
            if has_checkpoint and is_early:
                self._record.saves_early = True
        words = tuple(word for word in arguments if isinstance(word, str | int))
        call = Call(self._name, point, self.trainer.iter, words)
        if point in DRAWING:
            drawn = random.random() + np.random.rand() + torch.rand(()).item()
            call = call._replace(drawn=drawn)
        if point == "after_step" and self._name == "first":
            call = call._replace(
                batch=_digest(getattr(self.trainer, "batch", None)),
                losses=_losses_of(self.trainer),
            )
        attributes = attributes_of(self.trainer)
        self._record.calls.append(call)
        self._record.attributes.append(attributes)
        if point == "before_train":
            self._record.starts.append((_random_state(), attributes))

    def state_dict(self) -> dict[str, Any]:
        return {"before": len(self._record.once()) + (self.before or 0)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = state_dict["before"]


def _losses_of(trainer: Any) -> str:
    losses = getattr(trainer, "losses", None) or {}
    return ", ".join(f"{name} {_number(value)!r}" for name, value in losses.items())


def _number(value: Any) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


def attributes_of(trainer: Any) -> Attributes:
    """The attributes of the trainer and of its hooks, as far as they are of the user's classes.

    Without those of every trainer, and without its private ones.
    """
    found: Attributes = {}
    of_every_trainer = vars(TrainerBase())
    names: dict[str, int] = {}
    for owner in [trainer, *trainer.hooks]:
        name = owner.__class__.__name__
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        if owner.__class__.__module__.startswith("trainkit."):
            continue
        for attribute, value in vars(owner).items():
            is_private = attribute.startswith("_")
            if owner is trainer and (is_private or attribute in of_every_trainer):
                continue
            text = _text_of(value)
            if text:
                found[f"{name}.{attribute}"] = text
    return found


def _text_of(value: Any) -> str:
    """A plain value, a tensor or the state of a generator as text; "" for other objects.

    Also for a config: each run has its own folder in it.
    """
    if isinstance(value, CfgNode):
        return ""
    if isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Tensor):
        is_small = value.numel() == 1 and not value.is_complex()
        return repr(value.item()) if is_small else f"tensor {_digest(value)[:8]}"
    if isinstance(value, torch.Generator):
        return f"generator {_digest(value.get_state())[:8]}"
    if isinstance(value, random.Random):
        return f"generator {_digest(value.getstate())[:8]}"
    if isinstance(value, np.random.Generator):
        return f"generator {_digest(value.bit_generator.state)[:8]}"
    if isinstance(value, list | tuple | Mapping) and value:
        return f"{type(value).__name__} {_digest(value)[:8]}"
    return ""


def _digest(value: Any) -> str:
    """Of all numbers, texts and tensors in nested containers."""
    found = hashlib.sha256()
    for part in _parts(value):
        found.update(part)
    return found.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        dense = value.detach().cpu()
        dense = dense.dequantize() if dense.is_quantized else dense.to_dense()
        yield f"{dense.dtype} {list(dense.shape)}".encode()
        yield bytes_of(dense).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _parts(item)
    elif isinstance(value, list | tuple):
        yield f"{len(value)} entries".encode()
        for item in value:
            yield from _parts(item)
    elif isinstance(value, bool | int | float | complex | str | bytes | np.generic | None):
        yield repr(value).encode()
    else:
        yield type(value).__qualname__.encode()  # its text may have an address


def _random_state() -> str:
    """A digest of the states of all generators."""
    return _digest(get_rng_state())


def record_run(
    make_trainer: Callable[[Path], Any],
    folder: Path,
    *,
    seed: int,
    max_iter: int | None = None,
    keeper: Keeper | None = None,
) -> Record:
    """Train in a folder, which may hold the first part of a run.

    Args:
        seed: of the global generators, before the trainer is made.
        max_iter: None: the trainer is a `DefaultTrainer`, whose config says it.

    Raises:
        TypeError: ``make_trainer`` returns no trainer.
        ValueError: the trainer needs ``max_iter``.
    """
    seed_all_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    record = Record()
    trainer = make_trainer(folder)
    if not isinstance(trainer, TrainerBase):
        raise TypeError(f"make_trainer must return a trainer, got {trainer!r:.80}")
    first = Spy("first", record, keeper, trainer.has_epochs)
    last = Spy("last", record, keeper, trainer.has_epochs)
    trainer.register_hooks([first], priority="HIGHEST")
    trainer.register_hooks([last], priority="LOWEST")
    record.before = first.before
    if max_iter is not None:
        trainer.train(trainer.next_iter, max_iter)
    elif isinstance(trainer, DefaultTrainer):
        trainer.train()
    else:
        raise ValueError(f"max_iter must be given, since a {type(trainer).__name__} has no config")
    record.inexact = trainer.describe_inexact()
    comm.synchronize()
    return record
