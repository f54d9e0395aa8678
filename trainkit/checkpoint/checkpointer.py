"""Checkpointer: saves, finds, verifies and loads a model with its training state."""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from trainkit.checkpoint.atomic import CheckpointError, remove_leftovers, sync_folder, write_text
from trainkit.checkpoint.averaged import TRAINED
from trainkit.checkpoint.folder import FINISHED_FILE, SUFFIX, TAG_FILE, checkpoint_files, choose, find_checkpoint
from trainkit.checkpoint.format import CheckpointFormat, TorchFormat, format_of, make_format
from trainkit.checkpoint.matching import Differences, strip_wrapper_prefix, table_of
from trainkit.checkpoint.ranks import KEY as RANKS
from trainkit.checkpoint.ranks import gather_rank_states, take_rank_state
from trainkit.checkpoint.ranks import together as together
from trainkit.checkpoint.store import download, local_folder, mirror_of, upload_soon
from trainkit.utils import comm
from trainkit.utils.file_io import PathManager
from trainkit.utils.model import unwrap_model
from trainkit.utils.run_folder import is_owned_by_another

_logger = logging.getLogger(__name__)
_OLD_ENTRIES = ("new_buffers",)  # of older files; not used


class Stateful(Protocol):
    """An object that can be saved in a checkpoint.

    Optional: ``before_save(state)`` and ``after_load(state)``, which trainers have, get the whole state before it is
    written and after it is read, and may change it. ``rank_keys`` names the entries of its own state that differ
    between ranks; these are saved for each rank. If an object is loaded together with the model, the model gets the
    trained weights, unless the object has ``only_evaluates``; a model loaded alone gets the evaluated weights.
    """

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class Checkpointer:
    """Saves and loads a model together with other stateful objects.

    ``save("model_0004999")`` writes ``model_0004999.pth`` and puts its name into the text file ``last_checkpoint``,
    where ``resume_or_load`` finds it. If a save fails at any time, earlier files stay unchanged. Only one process may
    write to a folder.

    To convert foreign weights, override one of fvcore's methods in a subclass: ``_load_file(filename)``,
    ``_load_model(checkpoint)``, ``_convert_ndarray_to_tensor(state_dict)``, ``_log_incompatible_keys(incompatible)``.

    Args:
        model: data-parallel wrappers are removed.
        save_dir: created when first needed; ``""`` switches off saving and resuming. An address becomes a
            local folder whose files go to a store, see `trainkit.checkpoint.store`.
        save_to_disk: whether this process writes; None: rank 0 does.
        async_save: the same as ``format="async_save"``.
        format: a `CheckpointFormat`, or its registered name; "": one file of torch.save.
        checkpointables: name in the file -> object.

    Raises:
        ValueError, TypeError: as :meth:`add_checkpointable`.
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
        self.save_to_disk = comm.is_main_process() if save_to_disk is None else save_to_disk
        name = "async_save" if async_save else format
        self.format = name if isinstance(name, CheckpointFormat) else make_format(name) if name else TorchFormat()
        self._source = "the checkpoint", False  # (path, strict) of the current load
        self.checkpointables: dict[str, Stateful] = {}
        for key, obj in checkpointables.items():
            self.add_checkpointable(key, obj)

    def add_checkpointable(self, key: str, checkpointable: Stateful) -> None:
        """Add an object that is saved and loaded.

        Raises:
            ValueError: ``key`` is taken.
            TypeError: the object lacks ``state_dict`` or ``load_state_dict``.
        """
        if key == "model" or key in self.checkpointables:
            raise ValueError(f"the checkpoint has an entry {key!r} already; choose another key")
        if missing := [name for name in ("state_dict", "load_state_dict") if not hasattr(checkpointable, name)]:
            raise TypeError(
                f"checkpointable {key!r} of type {type(checkpointable).__name__} has no method {missing[0]}(); "
                "an object needs state_dict() and load_state_dict()"
            )
        self.checkpointables[key] = checkpointable

    # ---------------------------------------------------------------------------------------- saving
    def save(
        self, name: str, *, tag_last: bool = True, on_commit: Callable[[], None] | None = None, **kwargs: Any
    ) -> Any:
        """Write ``<save_dir>/<name>.pth``; every rank calls it, since states may be gathered over ranks.

        Args:
            name: without a folder or suffix.
            tag_last: whether a later resume starts from this file; False for a best checkpoint.
            on_commit: called after the file is on the disk, in the rank and the thread that write it.
            kwargs: further entries, such as ``iteration=99``; tensors or plain Python values.

        Returns:
            The future of a save that continues in a thread; None if everything is done.

        Raises:
            ValueError: ``name`` has a folder in it, or an entry of ``kwargs`` has the name of another entry.
            TypeError: a value in a state is neither a tensor nor a plain Python value; the message has its path.
            CheckpointError: the file cannot be written; earlier files are unchanged. For an asynchronous save this is
                raised by :meth:`wait` or :meth:`raise_error`.
        """
        if not name or os.path.basename(name) != name:
            raise ValueError(f"name must be a file name without a folder, got {name!r}; the folder is save_dir")
        if not self.save_dir:
            return None
        with contextlib.suppress(CheckpointError):  # of an earlier save, whose format has logged it
            self.wait()
        state = self.collect(kwargs)
        path = os.path.join(self.save_dir, name + SUFFIX)
        if self.save_to_disk:
            _logger.info("Saving checkpoint to %s", path)
        form = self.format.for_state(state)
        if form.collective:
            together(self._prepare_save_dir)
        elif self.save_to_disk:
            self._prepare_save_dir()
        if not (comm.broadcast(self.save_to_disk) if form.collective else self.save_to_disk):
            return None
        return form.submit(partial(self._write, form, form.prepare(state), path, tag_last, on_commit))

    def remove(self, name: str) -> None:
        """Remove a file, such as an old best checkpoint, if it is there; every rank may call it.

        Raises:
            OSError: it cannot be removed.
        """
        if self.save_to_disk:
            with contextlib.suppress(FileNotFoundError):
                self.format.remove(os.path.join(self.save_dir, name + SUFFIX))

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: the asynchronous save has failed; raised once, here or by :meth:`raise_error`.
        """
        self.format.wait()
        self.format.raise_error()

    def raise_error(self) -> None:
        """Raise the error of a failed asynchronous save, once; does not wait."""
        self.format.raise_error()

    def collect(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The state that a save would write now, with further ``entries``; every rank calls it."""
        state: dict[str, Any] = {"model": self.model.state_dict()}
        state |= {key: obj.state_dict() for key, obj in self.checkpointables.items()}
        if taken := sorted(state.keys() & entries.keys()):
            raise ValueError(f"save() got entries {taken}, which the checkpoint has already; give them other names")
        state |= entries
        for obj in self.checkpointables.values():
            if hasattr(obj, "before_save"):
                obj.before_save(state)
        keys = {key: getattr(obj, "rank_keys", ()) for key, obj in self.checkpointables.items()}
        if comm.get_world_size() > 1 and any(keys.values()):
            state[RANKS] = gather_rank_states(state, self.model, keys)
        return state

    def _prepare_save_dir(self) -> None:
        if self.save_to_disk:
            try:
                os.makedirs(self.save_dir, exist_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"cannot create the checkpoint folder '{self.save_dir}': {error.strerror or error}; choose another"
                ) from error
            remove_leftovers(self.save_dir)

    def _write(
        self, form: CheckpointFormat, state: Any, path: str, tag_last: bool, on_commit: Callable[[], None] | None
    ) -> None:
        form.write(state, path)
        if self.save_to_disk:
            if tag_last:
                self.tag_last_checkpoint(os.path.basename(path))
            if on_commit is not None:
                on_commit()
            upload_soon(self.save_dir)

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Make ``resume_or_load`` start from this file of ``save_dir``.

        Raises:
            CheckpointError: ``last_checkpoint`` cannot be written.
        """
        write_text(last_filename_basename, os.path.join(self.save_dir, TAG_FILE))

    # ---------------------------------------------------------------------------------------- the end of a run
    def mark_finished(self, info: dict[str, Any]) -> None:
        """Record in the folder that the run has finished; every rank calls it.

        Args:
            info: values that JSON can hold.

        Raises:
            CheckpointError: it cannot be written, or an asynchronous save has failed.
        """
        self.wait()
        if self.save_dir and self.save_to_disk:
            self._prepare_save_dir()
            write_text(json.dumps(info), os.path.join(self.save_dir, FINISHED_FILE))

    def finished(self) -> dict[str, Any] | None:
        """The ``info`` of :meth:`mark_finished`, as rank 0 reads it, or None; every rank calls it."""
        path, info = os.path.join(self.save_dir, FINISHED_FILE), None
        if comm.is_main_process() and self.save_dir and os.path.lexists(path):
            try:
                with open(path, encoding="utf-8") as file:
                    info = dict(json.load(file))
            except (OSError, TypeError, ValueError, RecursionError) as error:
                _logger.warning("'%s' is damaged and is ignored: %s", path, error)
        return comm.broadcast(info)

    def forget_finished(self) -> None:
        """Remove the record of :meth:`mark_finished`: the run continues.

        Raises:
            CheckpointError: it cannot be removed.
        """
        path = os.path.join(self.save_dir, FINISHED_FILE)
        if self.save_dir and self.save_to_disk and os.path.lexists(path):
            try:
                os.remove(path)
                sync_folder(self.save_dir)
            except OSError as error:
                raise CheckpointError(f"cannot remove '{path}': {error.strerror}; remove it by hand") from error

    # ---------------------------------------------------------------------------------------- finding
    def has_checkpoint(self) -> bool:
        """Whether ``save_dir`` holds a checkpoint to resume from."""
        return bool(self.get_checkpoint_file())

    def get_checkpoint_file(self) -> str:
        """Path of the file in ``last_checkpoint``; without it, of the newest trainkit checkpoint; else ``""``.

        Raises:
            CheckpointError: ``last_checkpoint`` names a file outside ``save_dir``.
        """
        self.format.wait()
        return find_checkpoint(self.save_dir)

    def get_all_checkpoint_files(self) -> list[str]:
        """Paths of all ``.pth`` files in ``save_dir``, sorted by name."""
        return checkpoint_files(self.save_dir)

    # ---------------------------------------------------------------------------------------- loading
    def load(
        self, path: str | os.PathLike[str] | None, checkpointables: Iterable[str] | None = None, *, strict: bool = False
    ) -> dict[str, Any]:
        """Load a file into the model and the checkpointables; a rank may call it alone.

        If keys of the model differ, they are logged as one table, and the other keys are loaded.

        Args:
            path: a file of trainkit or fvcore, or a bare model state dict; None and ``""`` load nothing.
            checkpointables: the keys to load besides the model; None: all.
            strict: whether different model keys and a missing checkpointable are errors.

        Returns:
            The entries of the file that were not used.

        Raises:
            CheckpointError: the file is missing, damaged or refused, or does not fit. Nothing has been loaded then.
            ValueError: ``checkpointables`` names an object that was not added.
        """
        keys = list(self.checkpointables if checkpointables is None else checkpointables)
        if unknown := [key for key in keys if key not in self.checkpointables]:
            raise ValueError(
                f"checkpointables has {unknown}, which were not added; accepted: {list(self.checkpointables)}"
            )
        if not path:
            _logger.info("No checkpoint to load; the model stays as it is")
            return {}
        path = download(path, self.path_manager)
        self.format.wait()
        state = self._load_file(path)
        format_of(state).verify(state, path)
        return self._apply(state, path, keys, strict)

    def resume_or_load(self, path: str | os.PathLike[str] | None, *, resume: bool = True) -> dict[str, Any]:
        """Resume from the last checkpoint in ``save_dir``, or load only the model from ``path``; every rank calls it.

        Resuming loads everything. If the last checkpoint is damaged, the newest intact one is used, with a warning.
        Rank 0 chooses the file for all ranks, and removes incomplete files of killed processes.

        Returns:
            The entries of the file that were not used.

        Raises:
            CheckpointError: no checkpoint of the folder is intact, a rank cannot read the file, or it does not fit.
        """
        self.format.wait()
        if resume:
            path_of_last, state = self._choose_and_read()
            if path_of_last:
                return self._apply(state, path_of_last, list(self.checkpointables), strict=True)
            _logger.info("No checkpoint to resume from in '%s'; starting from '%s'", self.save_dir, path or "")
        if not path:
            return self.load(path, checkpointables=[])
        path = together(partial(download, path, self.path_manager))
        return self._apply(self._read_on_all_ranks(path), path, [], strict=False)

    def _choose_and_read(self) -> tuple[str, dict[str, Any]]:
        broken: dict[str, str] = {}
        while True:
            path, state = together(partial(self._choose, broken), is_of_one=True)
            path = comm.broadcast(path)
            if not path:
                return "", {}
            try:
                return path, self._read_on_all_ranks(path, state)
            except _DamagedParts as error:
                broken[path] = str(error)

    def _choose(self, broken: dict[str, str]) -> tuple[str, Any]:
        if not comm.is_main_process():
            return "", None
        if (mirror := mirror_of(self.save_dir)) is not None:
            mirror.download()
        if self.save_to_disk and os.path.isdir(self.save_dir) and not is_owned_by_another(self.save_dir):
            remove_leftovers(self.save_dir)
        try:
            return choose(self.save_dir, broken, self._load_file)
        except CheckpointError:
            if mirror is None or not mirror.download_older():
                raise
            return choose(self.save_dir, broken, self._load_file)

    def _read_on_all_ranks(self, path: str, state: dict[str, Any] | None = None) -> dict[str, Any]:
        """Read and verify the same file on every rank; a rank that passes its ``state`` does not read it again.

        Raises:
            CheckpointError: on every rank, if one of them cannot read it.
            _DamagedParts: on every rank, although each rank verifies only some of the files.
        """
        found = together(lambda: self._load_file(path) if state is None else state)
        parts = {"part": comm.get_rank(), "num_parts": comm.get_world_size()}
        try:
            together(lambda: format_of(found).verify(found, path, **parts), is_of_one=True)
        except CheckpointError as error:
            raise _DamagedParts(str(error)) from error
        return found

    def _apply(self, state: dict[str, Any], path: str, keys: list[str], strict: bool) -> dict[str, Any]:
        if not isinstance(state.get("model"), Mapping):  # the state dict of a model alone
            state = {"model": state}
        if any(getattr(self.checkpointables[key], "rank_keys", ()) for key in keys):
            take_rank_state(state, path)
        state.pop(RANKS, None)
        wanted = [f"{key}." for key in ("model", *keys, *([TRAINED] if keys else []))]
        wanted += [read for obj in self.checkpointables.values() for read in getattr(obj, "paths_read", ())]
        state = format_of(state).fill(state, path, self.model, wanted)
        trained = state.pop(TRAINED, None)
        if trained and any(not getattr(self.checkpointables[key], "only_evaluates", False) for key in keys):
            state["model"] = trained
        for obj in self.checkpointables.values():
            if hasattr(obj, "after_load"):
                obj.after_load(state)
        absent = [key for key in keys if key not in state]
        if absent and strict:
            others = sorted(map(str, state.keys() - {"model"}))
            held = f"only weights and {others}" if others else "weights only"
            raise CheckpointError(
                f"'{path}' cannot be resumed: it holds {held}, no state for {absent}. To start a new run from its "
                "weights, set MODEL.WEIGHTS to this file and leave out --resume"
            )
        former, self._source = self._source, (path, strict)
        try:
            incompatible = self._load_model(state)
            if incompatible is not None:
                self._log_incompatible_keys(incompatible)
        finally:
            self._source = former
        for key in ("model", *_OLD_ENTRIES):  # an overridden method may have left the model
            state.pop(key, None)
        if absent:
            _logger.warning("'%s' holds no state for %s, which stay as they are", path, absent)
        for key in keys:
            if key in state:
                try:
                    self.checkpointables[key].load_state_dict(state.pop(key))
                except (LookupError, TypeError, AttributeError) as error:  # the state is damaged or not from trainkit
                    _logger.debug("Loading %r of '%s' has failed:", key, path, exc_info=True)
                    raise CheckpointError(
                        f"'{path}': the content of its entry {key!r} does not fit "
                        f"({type(error).__name__}: {error}); use another checkpoint"
                    ) from error
        _logger.info("Loaded %s", path)
        return state

    def _load_file(self, filename: str) -> dict[str, Any]:
        """The content of a file: a dict with the weights under "model", or the weights alone.

        Override it to read other formats or to rename weights; `load_trusted_pickle` reads files that this method
        refuses. It is called on each rank, also when a run is resumed.
        """
        content: dict[str, Any] = self.format.read(filename)
        return content

    def _load_model(self, checkpoint: dict[str, Any]) -> Any:
        """Load ``checkpoint.pop("model")`` into the model; numpy arrays in it become tensors.

        Returns:
            An object for ``_log_incompatible_keys``, with the lists ``missing_keys``, ``unexpected_keys`` and
            ``incorrect_shapes``; None logs nothing.
        """
        path, strict = self._source
        weights = checkpoint.pop("model")
        self._convert_ndarray_to_tensor(weights)
        weights = strip_wrapper_prefix(weights, self.model)
        own = self.model.state_dict()
        differences = Differences(weights, own)
        mismatched = {key for key, _, _ in differences.incorrect_shapes}
        nothing_fits = len(differences.unexpected_keys) + len(mismatched) == len(weights)
        if differences and (strict or nothing_fits):
            raise CheckpointError(
                f"'{path}' holds another model than this one:\n{table_of(differences)}\n"
                "build the model of the file (MODEL in a config), or name another file"
                + "; a model has to create all its tensors in its constructor"
                * strict
            )
        fitting = {key: value for key, value in weights.items() if key not in mismatched}
        fitting = self.format.for_state({"model": own}).adapt(fitting, own)
        try:
            self.model.load_state_dict(fitting, strict=False)
        except RuntimeError as error:  # such as for a sparse tensor
            raise CheckpointError(f"'{path}' does not fit the model; name another file: {error}") from error
        return differences

    def _convert_ndarray_to_tensor(self, state_dict: dict[str, Any]) -> None:
        """Replace the numpy arrays in ``state_dict``, in place."""
        for key, value in state_dict.items():
            if isinstance(value, np.ndarray | np.generic):
                state_dict[key] = torch.as_tensor(value)

    def _log_incompatible_keys(self, incompatible: Any) -> None:
        """Log the result of ``_load_model``."""
        if table := table_of(incompatible):
            _logger.warning(
                "Some weights in '%s' do not fit the model:\n%s\n"
                "Missing and mismatched weights stay as they were; to load all, build the model of the file",
                *(self._source[0], table),
            )


class _DamagedParts(CheckpointError):
    pass
