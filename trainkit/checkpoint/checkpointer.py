"""Checkpointer: saves, finds, verifies and loads a model with its training state."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from functools import partial
from typing import Any

import fvcore.common.checkpoint
from fvcore.common.checkpoint import _filter_reused_missing_keys
from torch import nn
from torch.optim import Optimizer

from trainkit.checkpoint.atomic import (
    CheckpointError,
    loading,
    remove_leftovers,
    sync_folder,
    write_text,
)
from trainkit.checkpoint.file import (
    SUFFIX,
    UnwritableError,
    ordinary,
    ordinary_or_divided,
    writable_state,
)
from trainkit.checkpoint.folder import (
    RUN_ID,
    candidates,
    choose,
    new_run_id,
    read_run_id,
    run_id_of,
    tagged_file,
)
from trainkit.checkpoint.format import CheckpointFormat, format_of, make_format
from trainkit.checkpoint.mirror import after_save, local_folder
from trainkit.checkpoint.optimizer_state import (
    describe_groups,
    fit_state,
    load_optimizer,
    names_in,
)
from trainkit.checkpoint.ranks import gather_rank_states, take_rank_state, together
from trainkit.utils import comm
from trainkit.utils.file_io import PathManager
from trainkit.utils.plugins import find_plugins, load

_logger = logging.getLogger(__name__)
_Path = str | os.PathLike[str]


class Checkpointer(fvcore.common.checkpoint.Checkpointer):
    """Saves and loads a model together with other objects.

    ``save("model_0004999")`` writes ``model_0004999.pth`` and puts its name into the text file ``last_checkpoint``,
    where ``resume_or_load`` finds it. If a save fails at any time, earlier files stay unchanged. Only one process may
    write to a folder. A subclass may override fvcore's methods, such as ``_load_file(filename)``.

    Args:
        save_dir: created by the first save; ``""`` switches off saving and resuming. An address becomes a local folder.
        save_to_disk: whether this process writes; None: rank 0 does.
        format: a `CheckpointFormat`, or its registered name; "": see `make_format`.
        checkpointables: name in the file -> object with ``state_dict`` and ``load_state_dict``. Optional:
            ``before_save(state)`` and ``after_load(state)`` may change the whole state before it is written and after
            it is read (``paths_read``: what the latter reads); ``rank_keys``: the entries of its state that differ
            between ranks; ``separate_states``: the entries whose own entries are states of different objects;
            ``check_state_dict(state)``: raises CheckpointError if it does not fit, before anything is loaded;
            ``only_evaluates``: a model loaded with it does not get the entry ``trained_model``.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: _Path = "",
        *,
        save_to_disk: bool | None = None,
        format: str | CheckpointFormat = "",
        **checkpointables: Any,
    ) -> None:
        writes = comm.is_main_process() if save_to_disk is None else save_to_disk
        super().__init__(
            model, local_folder(os.fspath(save_dir)), save_to_disk=writes, **checkpointables
        )
        self.logger, self.path_manager = _logger, PathManager
        self.format = make_format(format, self.model) if isinstance(format, str) else format
        self._is_prepared, self._is_strict = False, False  # the latter: of the current load
        self._writing: futures.Future[None] | None = None
        self.resumed_from = ""  # the name of the file that was loaded last to resume
        self._run_id = ""  # of this run; "" if the folder says it

    def save(
        self,
        name: str,
        *,
        tag_last: bool = True,
        on_commit: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> "futures.Future[None] | None":
        """Write ``<save_dir>/<name>.pth``; every rank calls it, since states may be gathered over ranks.

        Args:
            tag_last: whether a later resume starts from this file; False for a best checkpoint.
            on_commit: called after the file is on the disk, in the rank and the thread that write it.
            kwargs: further entries, such as ``iteration=99``.

        Returns:
            The future of a save that continues in a thread, whose error :meth:`wait` raises; else None.

        Raises:
            TypeError: a value in a state is neither a tensor nor a plain Python value; the message has its path. The
                file is written without the state that has it, and names the path in its entry ``left_out``.
            CheckpointError: the file cannot be written; earlier files are unchanged.
        """
        if not name or os.path.basename(name) != name:
            raise ValueError(f"name must be a file name without a folder, got {name!r}")
        if not self.save_dir:
            return None
        with contextlib.suppress(CheckpointError):  # of an earlier save, whose format has logged it
            self.wait()
        state, errors = self._collect(kwargs)
        path = os.path.join(self.save_dir, name + SUFFIX)
        if self.format.collective:
            together(self._prepare_folder)
        elif self.save_to_disk:
            self._prepare_folder()
        if self.format.collective or self.save_to_disk:
            if self.save_to_disk:
                _logger.info("Saving checkpoint to %s", path)
                self._run_id = self._run_id or read_run_id(self.save_dir) or new_run_id()
                state[RUN_ID] = self._run_id
            save = partial(self._write, self.format.prepare(state), path, tag_last, on_commit)
            self._writing = self.format.submit(save)
        if errors:
            self.wait()
            raise TypeError(f"{errors[0]}. '{path}' is written without this state")
        return self._writing

    def collect(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The state that a save would write now, with further ``entries``; every rank calls it."""
        return self._collect(entries)[0]

    def describe_unwritable(self) -> str:
        """Which value a save could not write now, and why; "" if there is none. Nothing is written or exchanged."""
        if not self.save_dir:
            return ""
        errors = self._writable(self._own_state())[1]
        return str(errors[0]) if errors else ""

    def _writable(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], list[UnwritableError]]:
        """A plain copy of what a file can hold, and the errors of the rest."""
        errors: list[UnwritableError] = []
        take = ordinary_or_divided if self.format.collective else ordinary
        return writable_state(state, self._separate_states(), take, errors), errors

    def _own_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self.model.state_dict()}
        groups = {}
        for key, obj in self.checkpointables.items():
            state[key] = obj.state_dict()
            if isinstance(obj, Optimizer):
                groups[key] = describe_groups(obj, names_in({"": self.model}))
        if groups:
            state["optimizer_groups"] = groups
        return state

    def _separate_states(self) -> set[str]:
        """The paths of dicts in the state whose entries belong to different objects."""
        paths = {"model", "trained_model"}
        for key, obj in self.checkpointables.items():
            names = getattr(obj, "separate_states", ())
            if names:
                paths.add(key)
            paths.update(f"{key}.{name}" for name in names)
        return paths

    def _collect(self, entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The state, and the reasons why parts of it are left out, on any rank."""
        objects = self.checkpointables
        state = {**self._own_state(), **entries}
        for obj in objects.values():
            if hasattr(obj, "before_save"):
                obj.before_save(state)
        state, errors = self._writable(state)
        found = [(error.path, str(error)) for error in errors]
        keys = {key: getattr(obj, "rank_keys", ()) for key, obj in objects.items()}
        if comm.get_world_size() > 1 and any(keys.values()):
            by_rank = comm.all_gather(found)
            found = list(dict.fromkeys(each for found_there in by_rank for each in found_there))
            state["ranks"] = gather_rank_states(state, self.model, keys)
        if found:
            state["left_out"] = [path for path, _ in found]
        return state, [text for _, text in found]

    def _prepare_folder(self) -> None:
        # once: a folder that is deleted during a run is an error
        if self.save_to_disk and not self._is_prepared:
            os.makedirs(self.save_dir, exist_ok=True)
            remove_leftovers(self.save_dir)
            self._is_prepared = True

    def _write(
        self, state: Any, path: str, tag_last: bool, on_commit: Callable[[], None] | None
    ) -> None:
        moves_tag = self.save_to_disk and tag_last
        is_other_run = moves_tag and read_run_id(self.save_dir) != self._run_id
        if is_other_run:
            # while it is absent, the folder belongs to the run of the file that is tagged
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(self.save_dir, RUN_ID))
        self.format.write(state, path)
        if moves_tag:
            self.tag_last_checkpoint(os.path.basename(path))
        if is_other_run:
            write_text(self._run_id, os.path.join(self.save_dir, RUN_ID))
        if moves_tag:
            self._run_id = ""
        if self.save_to_disk:
            sync_folder(self.save_dir)
            if on_commit is not None:
                on_commit()
            after_save(self.save_dir)

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Make ``resume_or_load`` start from this file of ``save_dir``."""
        write_text(last_filename_basename, os.path.join(self.save_dir, "last_checkpoint"))

    def remove(self, name: str) -> None:
        """Remove a file, such as an old best checkpoint, if it is there; every rank may call it. Raises OSError."""
        if self.save_to_disk:
            with contextlib.suppress(FileNotFoundError):
                self.format.remove(os.path.join(self.save_dir, name + SUFFIX))

    def wait(self) -> None:
        """Wait until nothing is being written; raises the error of an asynchronous save, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _settle(self) -> None:
        futures.wait([self._writing] if self._writing is not None else [])

    def has_checkpoint(self) -> bool:
        """Whether there is a run to resume."""
        return bool(self.get_checkpoint_file())

    def get_checkpoint_file(self) -> str:
        """Path of the file that ``last_checkpoint`` names, else of the newest one; ``""`` if there is no run."""
        self._settle()
        return next(candidates(self.save_dir, self._load_file), "")

    def load(
        self,
        path: _Path | None,
        checkpointables: Iterable[str] | None = None,
        *,
        strict: bool = False,
    ) -> dict[str, Any]:
        """Load a file of trainkit or fvcore, or the state dict of a model; a rank may call it alone.

        Args:
            path: None and ``""`` load nothing.
            checkpointables: the keys to load besides the model; None: all.
            strict: whether different model keys and a missing checkpointable are errors; else they are logged.

        Returns:
            The entries of the file that were not used.

        Raises:
            CheckpointError: the file is missing, damaged, refused (nothing is loaded then), or does not fit.
        """
        if not path:
            _logger.info("No checkpoint to load; the model stays as it is")
            return {}
        self._settle()
        path, keys = (
            self._local(path),
            [*(self.checkpointables if checkpointables is None else checkpointables)],
        )
        return self._apply(self._read(path, keys), path, keys, strict)

    def resume_or_load(self, path: _Path | None, *, resume: bool = True) -> dict[str, Any]:
        """Resume everything from the last checkpoint in ``save_dir``, or load only the model from ``path``.

        If the last checkpoint is damaged, or ``last_checkpoint`` is missing, the newest intact one of the same run is
        used, with a warning. Every rank calls it; rank 0 lists the files for all. Returns and raises as :meth:`load`.
        """
        self._settle()
        self.resumed_from = ""
        self._run_id = "" if resume else new_run_id()
        if resume:
            keys = [*self.checkpointables]
            last, state = choose(
                self._candidates(),
                lambda path: together(partial(self._read, path, keys, needs_all=True)),
            )
            if last:
                if comm.is_main_process() and not tagged_file(self.save_dir):
                    _logger.warning(
                        "'%s' has no last_checkpoint; resuming from its newest checkpoint, '%s'",
                        self.save_dir,
                        os.path.basename(last),
                    )
                self.resumed_from = os.path.basename(last)
                self._run_id = run_id_of(state)
                return self._apply(state, last, keys, strict=True)
            _logger.info(
                "No checkpoint to resume from in '%s'; starting from '%s'",
                self.save_dir,
                path or "",
            )
        if not path:
            return self.load(path)
        path = together(partial(self._local, path))
        return self._apply(together(partial(self._read, path, [])), path, [], strict=False)

    def _candidates(self) -> Iterator[str]:
        """The `candidates` that rank 0 finds, one by one on every rank."""
        paths = candidates(self.save_dir, self._load_file)
        while path := comm.broadcast(
            together(lambda: next(paths, "") if comm.is_main_process() else "")
        ):
            yield path

    def _local(self, path: _Path) -> str:
        try:
            # without such a project there are still http addresses
            if "://" in os.fspath(path) and "register_addresses" in find_plugins().names:
                load("register_addresses")(self.path_manager)
            return str(self.path_manager.get_local_path(os.fspath(path)))
        except Exception as error:  # each file system raises its own types
            raise CheckpointError(f"'{path}' cannot be downloaded: {error}") from error

    def _read(self, path: str, keys: list[str], needs_all: bool = False) -> dict[str, Any]:
        """The content of a file with this rank's part of the states of ``keys``, and with what is in further files."""
        state = self._load_file(path)
        try:
            return self._complete(state, path, keys, needs_all)
        except CheckpointError:
            raise
        except Exception as error:  # entries of any type
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"'{path}' is no checkpoint of trainkit ({reason})") from error

    def _complete(
        self, state: dict[str, Any], path: str, keys: list[str], needs_all: bool
    ) -> dict[str, Any]:
        objects = self.checkpointables
        if not isinstance(state.get("model"), Mapping):  # the state dict of a model alone
            if any(
                isinstance(item, Mapping) and "_extra_state" not in str(key)
                for key, item in state.items()
            ):
                raise CheckpointError(
                    f"'{path}' has entries {[*state]}, no 'model'; save a file of the weights alone"
                )
            state = {"model": state}
        left_out = _owners(_left_out_of(state))
        absent = [key for key in keys if key not in state and key not in left_out]
        if needs_all and absent:
            raise CheckpointError(
                f"'{path}' holds no state for {absent}; it can be MODEL.WEIGHTS of a new run"
            )
        parts = state.pop("ranks", None)
        if any(getattr(objects[key], "rank_keys", ()) for key in keys):
            take_rank_state(state, parts, path)
        wanted = [f"{key}." for key in ("model", *keys, *(["trained_model"] if keys else []))]
        wanted += [read for obj in objects.values() for read in getattr(obj, "paths_read", ())]
        return format_of(state).fill(state, path, self.model, wanted)

    def _load_file(self, filename: str) -> dict[str, Any]:
        """The content of a file: a dict with the weights under "model", or the weights alone; called on each rank."""
        suffix = os.path.splitext(filename)[1][1:]
        content: dict[str, Any] = (
            make_format(suffix) if suffix in find_plugins().formats else self.format
        ).read(filename)
        return content

    def _apply(
        self, state: dict[str, Any], path: str, keys: list[str], strict: bool
    ) -> dict[str, Any]:
        objects = self.checkpointables
        trained = state.pop("trained_model", None)
        state.pop(RUN_ID, None)
        with loading(f"'{path}'"):
            if trained and any(not getattr(objects[key], "only_evaluates", False) for key in keys):
                state["model"] = trained
            for obj in objects.values():
                if hasattr(obj, "after_load"):
                    obj.after_load(state)
        left_out = _left_out_of(state)
        state.pop("left_out", None)
        if left_out:
            _logger.warning(
                "'%s' was written without these states, which start anew: they held values that a file cannot hold: %s",
                path,
                ", ".join(left_out),
            )
            keys = [key for key in keys if key in state or key not in _owners(left_out)]
            strict = strict and "model" not in _owners(left_out)
        if not strict and (absent := [key for key in keys if key not in state]):
            _logger.warning("'%s' holds no state for %s, which stay as they are", path, absent)
            keys = [key for key in keys if key in state]
        groups = state.pop("optimizer_groups", {})
        self._is_strict = strict
        for key in keys:
            with loading(f"'{path}': its entry {key!r}"):
                self._check(key, state[key], groups)
        with loading(f"'{path}': its entry 'model'"):
            incompatible = self._load_model(state)
            if incompatible is not None:
                self._log_incompatible_keys(incompatible)
        state.pop("model", None)
        for key in keys:
            with loading(f"'{path}': its entry {key!r}"):
                self._load(key, state.pop(key), groups)
        _logger.info("Loaded %s", path)
        return state

    def _log_incompatible_keys(self, incompatible: Any) -> None:
        # fvcore's would color names, which come from a file of somebody else
        for name, saved, own in incompatible.incorrect_shapes:
            text = "The weight %r is left out: it has the shape %s in the checkpoint and %s in the model"
            _logger.warning(text, name, saved, own)
        missing = _filter_reused_missing_keys(self.model, incompatible.missing_keys)
        if missing:
            text = "The checkpoint does not have these weights, which stay as they are: %s"
            _logger.warning(text, ", ".join(sorted(missing)))
        if incompatible.unexpected_keys:
            text = "The model does not have these weights of the checkpoint: %s"
            _logger.warning(text, ", ".join(sorted(map(str, incompatible.unexpected_keys))))

    def _check(self, key: str, state: Any, groups: Mapping[str, Any]) -> None:
        """Raises CheckpointError if a state does not fit, as far as this can be known before anything is loaded."""
        obj = self.checkpointables[key]
        if isinstance(obj, Optimizer):
            fit_state(obj, state, groups.get(key, []), names_in({"": self.model}))
        elif hasattr(obj, "check_state_dict"):
            obj.check_state_dict(state)

    def _load(self, key: str, state: Any, groups: Mapping[str, Any]) -> None:
        obj = self.checkpointables[key]
        if not isinstance(obj, Optimizer):
            obj.load_state_dict(state)
            return
        adapt = getattr(self.model, "optimizer_state_to_load", None)
        load_optimizer(obj, state, groups.get(key, []), names_in({"": self.model}), adapt)

    def _load_model(self, checkpoint: dict[str, Any]) -> Any:
        """Load the entry "model" into the model; returns what ``_log_incompatible_keys`` logs, or None."""
        try:
            self.model.load_state_dict(checkpoint["model"])
        except RuntimeError:  # it names all differences
            if self._is_strict:
                raise
            num_weights = len(checkpoint["model"])
            found = super()._load_model(checkpoint)
            if len(found.unexpected_keys) + len(found.incorrect_shapes) == num_weights:
                raise
            return found
        return None


def _left_out_of(state: Mapping[str, Any]) -> list[str]:
    """The paths of the values for which states are not in the file."""
    paths = state.get("left_out")
    return [str(path) for path in paths] if isinstance(paths, list) else []


def _owners(paths: Iterable[str]) -> set[str]:
    """The entries of a file in which these paths start."""
    return {path.partition(".")[0] for path in paths}
