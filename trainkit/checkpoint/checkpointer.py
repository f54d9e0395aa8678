"""Checkpointer: saves, finds, verifies and loads a model with its training state."""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from trainkit.checkpoint.atomic import CheckpointError, remove_leftovers, sync_folder, write_text, writing
from trainkit.checkpoint.file import SUFFIX, is_ours
from trainkit.checkpoint.folder import candidates, checkpoint_files, choose, find_checkpoint, local_folder, mirrors
from trainkit.checkpoint.format import CheckpointFormat, format_of, make_format
from trainkit.checkpoint.matching import Differences, table_of, without_prefix
from trainkit.checkpoint.ranks import gather_rank_states, take_rank_state, together
from trainkit.utils import comm
from trainkit.utils.device import unwrap_model
from trainkit.utils.file_io import PathManager
from trainkit.utils.plugins import FORMATS, NAMES, MissingProjectError, load_plugin

_logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """An object in a checkpoint.

    Optional: ``before_save(state)`` and ``after_load(state)`` get the whole state before it is written and after it is
    read, and may change it (``paths_read``: what the latter reads). ``rank_keys`` are the entries of its state that
    differ between ranks. A model that is loaded with it gets the entry ``trained_model``, unless ``only_evaluates``.
    """

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class Checkpointer:
    """Saves and loads a model together with other stateful objects.

    ``save("model_0004999")`` writes ``model_0004999.pth`` and puts its name into the text file ``last_checkpoint``,
    where ``resume_or_load`` finds it. If a save fails at any time, earlier files stay unchanged. Only one process may
    write to a folder. A subclass may override fvcore's methods, such as ``_load_file(filename)``.

    Args:
        save_dir: created by the first save; ``""`` switches off saving and resuming. An address becomes a local folder.
        save_to_disk: whether this process writes; None: rank 0 does.
        async_save: the same as ``format="async_save"``.
        format: a `CheckpointFormat`, or its registered name; "": see `make_format`.
        checkpointables: name in the file -> object.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str | os.PathLike[str] = "",
        *,
        save_to_disk: bool | None = None,
        async_save: bool = False,
        format: str | CheckpointFormat = "",
        **checkpointables: Stateful,
    ) -> None:
        self.model = unwrap_model(model)
        self.logger, self.path_manager = _logger, PathManager  # for subclasses, as in fvcore
        self.save_dir = local_folder(os.fspath(save_dir))
        self._finished_file = os.path.join(self.save_dir, "finished")
        self.save_to_disk = comm.is_main_process() if save_to_disk is None else save_to_disk
        name = "async_save" if async_save else format
        self.format = make_format(name, self.model) if isinstance(name, str) else name
        self._is_prepared = False
        self._writing: futures.Future[None] | None = None
        self._source, self._is_strict = "the checkpoint", False  # of the current load
        self.checkpointables: dict[str, Stateful] = {}
        for key, obj in checkpointables.items():
            self.add_checkpointable(key, obj)

    def add_checkpointable(self, key: str, checkpointable: Stateful) -> None:
        """Add an object that is saved and loaded under ``key``, which must be new."""
        if key == "model" or key in self.checkpointables:
            raise ValueError(f"the checkpoint has an entry {key!r} already; choose another key")
        if not (hasattr(checkpointable, "state_dict") and hasattr(checkpointable, "load_state_dict")):
            raise TypeError(f"{key!r} is a {type(checkpointable).__name__} without state_dict() or load_state_dict()")
        self.checkpointables[key] = checkpointable

    def save(
        self, name: str, *, tag_last: bool = True, on_commit: Callable[[], None] | None = None, **kwargs: Any
    ) -> "futures.Future[None] | None":
        """Write ``<save_dir>/<name>.pth``; every rank calls it, since states may be gathered over ranks.

        Args:
            tag_last: whether a later resume starts from this file; False for a best checkpoint.
            on_commit: called after the file is on the disk, in the rank and the thread that write it.
            kwargs: further entries, such as ``iteration=99``; tensors or plain Python values.

        Returns:
            The future of a save that continues in a thread, whose error :meth:`wait` raises; else None.

        Raises:
            TypeError: a value in a state is neither a tensor nor a plain Python value; the message has its path.
            CheckpointError: the file cannot be written; earlier files are unchanged.
        """
        if not name or os.path.basename(name) != name:
            raise ValueError(f"name must be a file name without a folder, got {name!r}")
        if not self.save_dir:
            return None
        with contextlib.suppress(CheckpointError):  # of an earlier save, whose format has logged it
            self.wait()
        state, path = self.collect(kwargs), os.path.join(self.save_dir, name + SUFFIX)
        if self.save_to_disk:
            _logger.info("Saving checkpoint to %s", path)
        if self.format.collective:
            together(self._prepare_folder)
        elif self.save_to_disk:
            self._prepare_folder()
        else:
            return None
        save = partial(self._write, self.format.prepare(state), path, tag_last, on_commit)
        self._writing = self.format.submit(save)
        return self._writing

    def collect(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The state that a save would write now, with further ``entries``; every rank calls it."""
        objects = {"model": self.model, **self.checkpointables}
        state: dict[str, Any] = {**{key: obj.state_dict() for key, obj in objects.items()}, **entries}
        for obj in self.checkpointables.values():
            if hasattr(obj, "before_save"):
                obj.before_save(state)
        keys = {key: getattr(obj, "rank_keys", ()) for key, obj in self.checkpointables.items()}
        if comm.get_world_size() > 1 and any(keys.values()):
            state["ranks"] = gather_rank_states(state, self.model, keys)
        return state

    def _prepare_folder(self) -> None:
        if self.save_to_disk and not self._is_prepared:  # once: a folder that is deleted during a run is an error
            with writing(self.save_dir):
                os.makedirs(self.save_dir, exist_ok=True)
            remove_leftovers(self.save_dir)
            self._is_prepared = True

    def _write(self, state: Any, path: str, tag_last: bool, on_commit: Callable[[], None] | None) -> None:
        self.format.write(state, path)
        if self.save_to_disk:
            if tag_last:
                self.tag_last_checkpoint(os.path.basename(path))
            if on_commit is not None:
                on_commit()
            for mirror in mirrors.values():
                mirror.after_save(self.save_dir)

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

    def mark_finished(self, info: dict[str, Any]) -> None:
        """Record in the folder that the run has finished; ``info`` is for JSON. Every rank calls it."""
        self.wait()
        if self.save_dir and self.save_to_disk:
            self._prepare_folder()
            write_text(json.dumps(info), self._finished_file)

    def finished(self) -> dict[str, Any] | None:
        """The ``info`` of :meth:`mark_finished`, as rank 0 reads it, or None; every rank calls it."""
        info = None
        if comm.is_main_process() and self.save_dir:
            with contextlib.suppress(OSError, TypeError, ValueError), open(self._finished_file, "rb") as file:
                info = dict(json.load(file))  # a damaged file counts as none
        return comm.broadcast(info)

    def forget_finished(self) -> None:
        """Remove the record of :meth:`mark_finished`: the run continues. Raises OSError if it cannot be removed."""
        if self.save_dir and self.save_to_disk:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._finished_file)
                sync_folder(self.save_dir)

    def has_checkpoint(self) -> bool:
        """Whether ``save_dir`` holds a checkpoint to resume from."""
        return bool(self.get_checkpoint_file())

    def get_checkpoint_file(self) -> str:
        """Path of the file in ``last_checkpoint``; without it, of the newest trainkit checkpoint; else ``""``."""
        self._settle()
        return find_checkpoint(self.save_dir)

    def get_all_checkpoint_files(self) -> list[str]:
        """Paths of all ``.pth`` files in ``save_dir``, sorted by name."""
        return checkpoint_files(self.save_dir)

    def load(
        self, path: str | os.PathLike[str] | None, checkpointables: Iterable[str] | None = None, *, strict: bool = False
    ) -> dict[str, Any]:
        """Load a file of trainkit or fvcore, or the state dict of a model; a rank may call it alone.

        Args:
            path: None and ``""`` load nothing.
            checkpointables: the keys to load besides the model; None: all.
            strict: whether different model keys and a missing checkpointable are errors; else they are logged.

        Returns:
            The entries of the file that were not used.

        Raises:
            CheckpointError: the file is missing, damaged or refused, or does not fit. Nothing has been loaded then.
        """
        if not path:
            _logger.info("No checkpoint to load; the model stays as it is")
            return {}
        self._settle()
        path, keys = self._local(path), [*(self.checkpointables if checkpointables is None else checkpointables)]
        return self._apply(self._fill(self._load_file(path), path, keys), path, keys, strict)

    def resume_or_load(self, path: str | os.PathLike[str] | None, *, resume: bool = True) -> dict[str, Any]:
        """Resume everything from the last checkpoint in ``save_dir``, or load only the model from ``path``.

        If the last checkpoint is damaged, the newest intact one is used, with a warning. Every rank calls it; rank 0
        lists the files for all. Returns and raises as :meth:`load`.
        """
        self._settle()
        if resume:
            keys = [*self.checkpointables]
            paths = comm.broadcast(together(lambda: self._candidates() if comm.is_main_process() else []))
            read = partial(self._read_together, keys=keys)
            last, state = choose(paths, read, lambda path: comm.broadcast(is_ours(path)))  # all ranks choose the same
            if last:
                return self._apply(state, last, keys, strict=True)
            _logger.info("No checkpoint to resume from in '%s'; starting from '%s'", self.save_dir, path or "")
        if not path:
            return self.load(path)
        path = together(partial(self._local, path))
        return self._apply(self._read_together(path, []), path, [], strict=False)

    def _candidates(self) -> list[str]:
        if self.save_dir in mirrors:
            mirrors[self.save_dir].download()
        return candidates(self.save_dir)

    def _read_together(self, path: str, keys: list[str]) -> dict[str, Any]:
        return together(partial(self._fill, together(partial(self._load_file, path)), path, keys))

    def _fill(self, state: dict[str, Any], path: str, keys: list[str]) -> dict[str, Any]:
        """The content of a file with this rank's part of the states of ``keys``, and with what is in further files."""
        if not isinstance(state.get("model"), Mapping):  # the state dict of a model alone
            state = {"model": state}
        parts, objects = state.pop("ranks", None), self.checkpointables
        if any(getattr(objects[key], "rank_keys", ()) for key in keys):
            take_rank_state(state, parts, path)
        wanted = [f"{key}." for key in ("model", *keys, *(["trained_model"] if keys else []))]
        wanted += [read for obj in objects.values() for read in getattr(obj, "paths_read", ())]
        return format_of(state).fill(state, path, self.model, wanted)

    def _local(self, path: str | os.PathLike[str]) -> str:
        try:
            if "://" in os.fspath(path):
                with contextlib.suppress(MissingProjectError):  # http addresses need no project
                    load_plugin(NAMES["register_addresses"]).register_addresses(self.path_manager)
            return str(self.path_manager.get_local_path(os.fspath(path)))
        except Exception as error:  # each file system raises its own types
            raise CheckpointError(f"'{path}' cannot be downloaded: {error}") from error

    def _apply(self, state: dict[str, Any], path: str, keys: list[str], strict: bool) -> dict[str, Any]:
        objects, trained = self.checkpointables, state.pop("trained_model", None)
        if trained and any(not getattr(objects[key], "only_evaluates", False) for key in keys):
            state["model"] = trained
        for obj in objects.values():
            if hasattr(obj, "after_load"):
                obj.after_load(state)
        if absent := [key for key in keys if key not in state]:
            if strict:
                raise CheckpointError(
                    f"'{path}' cannot be resumed: it holds {sorted(map(str, state))}, no state for {absent}; to start "
                    "a new run from its weights, set MODEL.WEIGHTS to it and leave out --resume"
                )
            _logger.warning("'%s' holds no state for %s, which stay as they are", path, absent)
        self._source, self._is_strict = path, strict
        incompatible = self._load_model(state)
        if incompatible is not None:
            self._log_incompatible_keys(incompatible)
        for key in ("model", "new_buffers"):  # an overridden method may have left the model; an entry of older files
            state.pop(key, None)
        for key in [key for key in keys if key in state]:
            try:
                objects[key].load_state_dict(state.pop(key))
            except (LookupError, TypeError, AttributeError) as error:  # the state is damaged or not from trainkit
                reason = f"{type(error).__name__}: {error}"
                raise CheckpointError(
                    f"'{path}': its entry {key!r} does not fit ({reason}); use another checkpoint"
                ) from error
        _logger.info("Loaded %s", path)
        return state

    def _load_file(self, filename: str) -> dict[str, Any]:
        """The content of a file: a dict with the weights under "model", or the weights alone; called on each rank."""
        suffix = os.path.splitext(filename)[1][1:]
        content: dict[str, Any] = (make_format(suffix) if suffix in FORMATS else self.format).read(filename)
        return content

    def _load_model(self, checkpoint: dict[str, Any]) -> Any:
        """Load ``checkpoint.pop("model")`` into the model; returns what ``_log_incompatible_keys`` logs, or None."""
        weights, own = checkpoint.pop("model"), self.model.state_dict()
        self._convert_ndarray_to_tensor(weights)
        weights = without_prefix(weights, own)
        differences = Differences(weights, own)
        fitting = {key: weights[key] for key in differences.fitting_keys}
        if differences and (self._is_strict or not fitting):
            raise CheckpointError(
                f"'{self._source}' holds another model than this one:\n{table_of(differences)}\n"
                "build the model of the file (MODEL in a config); it creates all its tensors in its constructor"
            )
        self.model.load_state_dict(fitting, strict=False)
        return differences

    def _convert_ndarray_to_tensor(self, state_dict: dict[str, Any]) -> None:
        """Replace the numpy arrays in ``state_dict``, in place."""
        for key, value in state_dict.items():
            if isinstance(value, np.ndarray | np.generic):
                state_dict[key] = torch.as_tensor(value)

    def _log_incompatible_keys(self, incompatible: Any) -> None:
        if table := table_of(incompatible):
            _logger.warning("Some weights in '%s' do not fit the model and are not loaded:\n%s", self._source, table)
