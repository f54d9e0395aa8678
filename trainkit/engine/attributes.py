"""The attributes of a trainer that are part of its state.

They are optimizers, schedules, gradient scalers and modules.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from fvcore.common.checkpoint import Checkpointer as FvcoreCheckpointer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit.checkpoint.errors import loading
from trainkit.checkpoint.optimizer_groups import describe_groups
from trainkit.checkpoint.optimizer_state import fit_state, load_optimizer
from trainkit.checkpoint.ranks import digest_of
from trainkit.utils import comm
from trainkit.utils.device import unwrap_model
from trainkit.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_SAVED = (Optimizer, LRScheduler, torch.amp.GradScaler, nn.Module)


def stateful_attributes(trainer: Any, *, private: bool = False) -> dict[str, Any]:
    """name -> object, of the public attributes.

    And of one level of lists, tuples and dicts, with names such as "optimizers.judge".

    Args:
        private: of the attributes whose names start with an underscore instead.
    """
    candidates: dict[str, Any] = {}
    for attribute, value in vars(trainer).items():
        if attribute.startswith("_") != private:
            continue
        if isinstance(value, Mapping):
            for key, item in value.items():
                candidates[f"{attribute}.{key}"] = item
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                candidates[f"{attribute}.{number}"] = item
        else:
            candidates[attribute] = value
    found: dict[str, Any] = {}
    for name, value in candidates.items():
        if isinstance(value, _SAVED) and all(value is not other for other in found.values()):
            found[name] = value
    return found


def checkpointers_of(trainer: Any) -> list[FvcoreCheckpointer]:
    """The checkpointers that are attributes of the trainer or of its hooks."""
    owners = [trainer, *trainer.hooks]
    found: list[FvcoreCheckpointer] = []
    for owner in owners:
        for value in vars(owner).values():
            is_new = all(value is not other for other in found)
            if isinstance(value, FvcoreCheckpointer) and is_new:
                found.append(value)
    return found


class Attributes:
    """The states of a trainer's attributes.

    An attribute that is made after loading gets its state when the run starts.

    Args:
        trainer: a weak reference.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._waiting: dict[str, Any] = {}  # name -> state, of attributes that do not exist yet
        self._groups: dict[str, Any] = {}  # of the optimizers among them, see `describe_groups`
        # names; None: nothing was loaded since the last start
        self._loaded: set[str] | None = None
        self._logged: set[str] = set()
        self._has_compared = False  # with other ranks, since the last start

    def objects(self) -> dict[str, Any]:
        """name -> object, of all whose state is saved here.

        Raises:
            ConfigError: ranks hold parts of one; the message has the line that saves it.
        """
        found = self._not_saved_elsewhere(stateful_attributes(self._trainer))
        for name, value in found.items():
            _refuse_divided(name, value)
        return found

    def private(self) -> list[str]:
        """The names of private attributes that would be saved if they were public."""
        return [*self._not_saved_elsewhere(stateful_attributes(self._trainer, private=True))]

    def _not_saved_elsewhere(self, candidates: Mapping[str, Any]) -> dict[str, Any]:
        """The candidates but for those that are left out, saved elsewhere, or a part of these."""
        saved = _saved_elsewhere(self._trainer)
        saved_ids = {id(each) for each in saved}
        found = {}
        modules = {}
        for name, value in candidates.items():
            if self._is_left_out(name) or id(_unwrap(value)) in saved_ids:
                continue
            found[name] = value
            if isinstance(value, nn.Module):
                modules[name] = value
        if modules:
            part_ids = _ids_of_parts(saved)
            for name, module in modules.items():
                if _is_within(module, part_ids):
                    del found[name]
        return found

    def _is_left_out(self, name: str) -> bool:
        unsaved = self._trainer.unsaved
        return name in unsaved or name.partition(".")[0] in unsaved

    def names(self) -> dict[str, Tensor]:
        """The names of the parameters of this run, see `names_in`."""
        return self._trainer.parameter_names()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The entries ``attributes`` and ``attribute_groups`` of a trainer's state.

        {} if there is no attribute.
        """
        states = dict(self._waiting)
        groups = dict(self._groups)
        sizes = {}
        for name, value in self.objects().items():
            state = _unwrap(value).state_dict()
            if not state:
                continue
            states[name] = state
            size_mib = _size_of(state) / 2**20
            sizes[name] = f"{name} ({type(value).__name__}, {size_mib:.1f} MiB)"
            if isinstance(value, Optimizer):
                groups[name] = describe_groups(value, self.names())
        if not sizes.keys() <= self._logged:
            self._logged.update(sizes)
            logger.info(
                "Attributes of the trainer that checkpoints hold: %s. `unsaved` of the class "
                "leaves them out",
                ", ".join(sizes.values()),
            )
        if not states:
            return {}
        return {"attributes": states, "attribute_groups": groups}

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the state of an optimizer does not fit; nothing is changed."""
        states = state_dict.get("attributes", {})
        groups = state_dict.get("attribute_groups", {})
        for name, value in self.objects().items():
            if name in states and isinstance(value, Optimizer):
                with loading(f"trainer.{name}"):
                    fit_state(value, states[name], groups.get(name, []), self.names())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the states of the attributes that exist; the others wait. Raises CheckpointError."""
        self._waiting = dict(state_dict.get("attributes", {}))
        self._groups = dict(state_dict.get("attribute_groups", {}))
        self._loaded = set()
        self.hand_out()

    def hand_out(self) -> None:
        """Give the waiting states to the attributes that exist now."""
        if not self._waiting:
            return
        for name, value in self.objects().items():
            if name not in self._waiting:
                continue
            state = self._waiting.pop(name)
            groups = self._groups.pop(name, [])
            with loading(f"trainer.{name} ({type(value).__name__})"):
                if isinstance(value, Optimizer):
                    load_optimizer(value, state, groups, self.names())
                else:
                    _unwrap(value).load_state_dict(state)
            if self._loaded is not None:
                self._loaded.add(name)

    def finish_loading(self) -> None:
        """Call when the run starts: hand out the rest, and warn of what has no counterpart."""
        if self._loaded is None:
            return
        self.hand_out()
        untaken = [name for name in self._waiting if not self._is_left_out(name)]
        if untaken:
            logger.warning(
                "The checkpoint has states of attributes that the trainer does not have: %s",
                untaken,
            )
        new = []
        for name, value in self.objects().items():
            if name not in self._loaded and _unwrap(value).state_dict():
                new.append(name)
        if new:
            logger.warning(
                "The checkpoint has no state of these attributes of the trainer, which start anew: "
                "%s",
                new,
            )
        self._waiting = {}
        self._groups = {}
        self._loaded = None

    def compare_ranks(self) -> None:
        """Compare the weights of the modules over the ranks, once in a run; every rank calls it.

        Nothing averages the gradients of a module that is not wrapped.

        Raises:
            ConfigError: ranks have different weights; a checkpoint holds those of rank 0 only.
        """
        if self._has_compared or comm.get_world_size() == 1:
            return
        self._has_compared = True
        digests = {}
        for name, value in self.objects().items():
            if isinstance(value, nn.Module):
                digests[name] = [digest_of(parameter) for parameter in value.parameters()]
        by_rank = comm.all_gather(digests)
        first = by_rank[0]
        for rank, of_rank in enumerate(by_rank):
            for name in {**first, **of_rank}:
                if of_rank.get(name) != first.get(name):
                    raise ConfigError(
                        f"trainer.{name} has other weights on rank {rank} than on rank 0: nothing "
                        "averages its gradients, and checkpoints hold those of rank 0. Wrap it, "
                        f"trainer.{name} = create_ddp_model(module), or leave it out of "
                        f'checkpoints by unsaved = ("{name}",) in the class'
                    )

    def check_start(self) -> None:
        """Warn of names in ``unsaved`` that the trainer does not have.

        Raises:
            TypeError: ``unsaved`` is no tuple or list.
            ConfigError: as `objects`.
        """
        self._has_compared = False
        self.objects()
        unsaved = self._trainer.unsaved
        if not isinstance(unsaved, tuple | list):
            raise TypeError(f'unsaved has to be names, such as ("teacher",); got {unsaved!r}')
        attributes = vars(self._trainer)
        unknown = [name for name in unsaved if name.partition(".")[0] not in attributes]
        if unknown:
            logger.warning("`unsaved` names %s, which the trainer does not have", unknown)


def _saved_elsewhere(trainer: Any) -> list[Any]:
    """The objects whose state a checkpoint has in another entry."""
    saved = list(trainer.saved_objects())
    for hook in trainer.hooks:
        saved += hook.saved_objects()
    for checkpointer in checkpointers_of(trainer):
        saved.append(checkpointer.model)
        saved += checkpointer.checkpointables.values()
    return [_unwrap(each) for each in saved]


def _unwrap(value: Any) -> Any:
    """The module inside DistributedDataParallel and torch.compile; anything else as it is."""
    if not isinstance(value, nn.Module):
        return value
    inner = unwrap_model(value)
    compiled = getattr(inner, "_orig_mod", None)
    if isinstance(compiled, nn.Module):
        return _unwrap(compiled)
    return inner


def _ids_of_parts(objects: Iterable[Any]) -> set[int]:
    """The ids of all modules and tensors of the modules among ``objects``."""
    ids: set[int] = set()
    for each in objects:
        if isinstance(each, nn.Module):
            ids.update(map(id, each.modules()))
            ids.update(map(id, each.parameters()))
            ids.update(map(id, each.buffers()))
    return ids


def _is_within(module: nn.Module, ids: set[int]) -> bool:
    """Whether the module is one of these parts, or all that its state holds is."""
    if id(_unwrap(module)) in ids:
        return True
    state = module.state_dict(keep_vars=True)
    return all(id(value) in ids for value in state.values())


def _refuse_divided(name: str, value: Any) -> None:
    """Raises ConfigError if ranks hold parts of the parameters."""
    parameters: list[Tensor] = []
    if isinstance(value, nn.Module):
        parameters = list(value.parameters())
    elif isinstance(value, Optimizer):
        for group in value.param_groups:
            parameters += group["params"]
    if any(hasattr(parameter, "full_tensor") for parameter in parameters):
        key = name.replace(".", "_")
        raise ConfigError(
            f"ranks hold parts of trainer.{name} ({type(value).__name__}), which a trainer does "
            f'not save by itself. Save it by checkpointer.add_checkpointable("{key}", '
            f'trainer.{name}), or leave it out by unsaved = ("{name}",) in the class'
        )


def _size_of(state: Any) -> int:
    """Bytes of all tensors in nested containers."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(_size_of(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(_size_of(value) for value in state)
    return 0
