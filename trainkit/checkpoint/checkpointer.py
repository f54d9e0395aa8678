"""Checkpointer: saves, finds, verifies and loads a model with its training state."""

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import fvcore.common.checkpoint
from fvcore.common.checkpoint import _filter_reused_missing_keys
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.checkpoint.atomic import remove_leftovers, sync_folder, write_text
from trainkit.checkpoint.errors import CheckpointError, loading
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
from trainkit.checkpoint.mirror import local_folder, tell_mirrors
from trainkit.checkpoint.optimizer_groups import describe_groups, names_in
from trainkit.checkpoint.optimizer_state import fit_state, load_optimizer
from trainkit.checkpoint.ranks import gather_rank_states, take_rank_state, together
from trainkit.utils import comm
from trainkit.utils.file_io import PathManager
from trainkit.utils.periods import say_done
from trainkit.utils.plugins import find_plugins, load

_logger = logging.getLogger(__name__)
_Path = str | os.PathLike[str]


class Checkpointer(fvcore.common.checkpoint.Checkpointer):
    """Saves and loads a model together with other objects.

    ``save("model_0004999")`` writes ``model_0004999.pth`` and puts its name into the text file
    ``last_checkpoint``, where ``resume_or_load`` finds it. If a save fails at any time, earlier
    files stay unchanged. Only one process may write to a folder. A subclass may override fvcore's
    methods, such as ``_load_file(filename)``.

    Args:
        save_dir: created by the first save; ``""`` switches off saving and resuming. An address
            becomes a local folder.
        save_to_disk: whether this process writes; None: rank 0 does.
        format: a `CheckpointFormat`, or its registered name; "": see `make_format`.
        checkpointables: name in the file -> object with ``state_dict`` and ``load_state_dict``.

    A checkpointable may have:

    - ``before_save(state)``: may change the whole state before it is written.
    - ``after_load(state)``: may change the whole state after it is read. ``paths_read``: the starts
      of the paths that it reads.
    - ``check_state_dict(state)``: raises CheckpointError if its state does not fit, before anything
      is loaded.
    - ``rank_keys``: the entries of its state that differ between ranks.
    - ``separate_states``: the entries of its state that hold states of different objects. If one of
      these cannot be written, the others are.
    - ``only_evaluates``: if only such objects are loaded, the model gets the weights for evaluation,
      which are the entry ``model``, also if there is an entry ``trained_model``.
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
        if save_to_disk is None:
            save_to_disk = comm.is_main_process()
        folder = local_folder(os.fspath(save_dir))
        super().__init__(model, folder, save_to_disk=save_to_disk, **checkpointables)
        self.logger = _logger
        self.path_manager = PathManager
        if isinstance(format, str):
            self.format = make_format(format, self.model)
        else:
            self.format = format
        self.resumed_from = ""  # the name of the file that was loaded last to resume
        self.has_loaded = False  # whether the model has the weights of a file
        # the model's weights that the last load has left as they were built
        self._not_loaded: list[str] = []
        self._is_folder_prepared = False
        self._is_strict = False  # of the current load, for `_load_model`
        self._writing: futures.Future[None] | None = None
        # the id of a new run, or of one loaded from elsewhere, until its first tagged save has
        # taken the folder; "" if the folder's file says it
        self._run_id = ""

    def save(
        self,
        name: str,
        *,
        tag_last: bool = True,
        on_commit: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> "futures.Future[None] | None":
        """Write ``<save_dir>/<name>.pth``.

        Every rank calls it, since states may be gathered over ranks.

        Args:
            tag_last: whether a later resume starts from this file; False for a best checkpoint.
            on_commit: called after the file is on the disk, in the rank and the thread that write
                it.
            kwargs: further entries, such as ``iteration=99``.

        Returns:
            The future of a save that continues in a thread, whose error :meth:`wait` raises; else
            None.

        Raises:
            TypeError: a value in a state is neither a tensor nor a plain Python value; the message
                has its path. The file is written without the state that has it, and names the path
                in its entry ``left_out``.
            CheckpointError: the file cannot be written; earlier files are unchanged.
        """
        if not name or os.path.basename(name) != name:
            raise ValueError(f"name must be a file name without a folder, got {name!r}")
        if not self.save_dir:
            return None
        with contextlib.suppress(CheckpointError):  # of an earlier save, whose format has logged it
            self.wait()
        state, reasons = self._collect(kwargs)
        path = os.path.join(self.save_dir, name + SUFFIX)
        if self.format.collective:
            together(self._prepare_folder)
        else:
            self._prepare_folder()
        takes_folder = False
        if self.save_to_disk:
            _logger.info("Saving checkpoint to %s%s", path, _progress(kwargs.get("iteration")))
            run_id_of_folder = read_run_id(self.save_dir)
            self._run_id = self._run_id or run_id_of_folder or new_run_id()
            takes_folder = tag_last and run_id_of_folder != self._run_id
            state[RUN_ID] = self._run_id
        if self.save_to_disk or self.format.collective:
            prepared = self.format.prepare(state)
            del state  # to free it later would compete with a thread that writes
            save = partial(self._write, prepared, path, tag_last, takes_folder, on_commit)
            self._writing = self.format.submit(save)
        if reasons:
            self.wait()
            raise TypeError(f"{reasons[0]}. '{path}' is written without this state")
        return self._writing

    def _collect(self, entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The state to write, and the reason for each part that is left out on any rank."""
        state = {**self._own_state(), **entries}
        for obj in self.checkpointables.values():
            if hasattr(obj, "before_save"):
                obj.before_save(state)
        state, errors = self._leave_out_unwritable(state)
        left_out = [(error.path, str(error)) for error in errors]  # path and reason
        rank_keys = {
            key: getattr(obj, "rank_keys", ()) for key, obj in self.checkpointables.items()
        }
        if comm.get_world_size() > 1 and any(rank_keys.values()):
            by_rank = comm.all_gather(left_out)
            left_out = list(dict.fromkeys(itertools.chain(*by_rank)))  # each once
            state["ranks"] = gather_rank_states(state, self.model, rank_keys)
        if left_out:
            state["left_out"] = [path for path, _ in left_out]
        return state, [reason for _, reason in left_out]

    def _own_state(self) -> dict[str, Any]:
        """The states of the model and of the checkpointables."""
        state: dict[str, Any] = {"model": self.model.state_dict()}
        groups = {}
        for key, obj in self.checkpointables.items():
            state[key] = obj.state_dict()
            if isinstance(obj, Optimizer):
                groups[key] = describe_groups(obj, self._parameter_names())
        if groups:
            state["optimizer_groups"] = groups
        return state

    def _parameter_names(self) -> dict[str, Tensor]:
        return names_in({"": self.model})

    def _leave_out_unwritable(
        self, state: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[UnwritableError]]:
        """A plain copy without the states that a file cannot hold; an error for each of these."""
        errors: list[UnwritableError] = []
        take = ordinary_or_divided if self.format.collective else ordinary
        plain = writable_state(state, self._separate_states(), take, errors)
        return plain, errors

    def _separate_states(self) -> set[str]:
        """The paths of dicts in the state whose entries belong to different objects."""
        paths = {"model", "trained_model"}
        for key, obj in self.checkpointables.items():
            names = getattr(obj, "separate_states", ())
            if names:
                paths.add(key)
            paths.update(f"{key}.{name}" for name in names)
        return paths

    def _prepare_folder(self) -> None:
        # once: a folder that is deleted during a run is an error
        if self.save_to_disk and not self._is_folder_prepared:
            os.makedirs(self.save_dir, exist_ok=True)
            remove_leftovers(self.save_dir)
            self._is_folder_prepared = True

    def _write(
        self,
        state: Any,
        path: str,
        tag_last: bool,
        takes_folder: bool,
        on_commit: Callable[[], None] | None,
    ) -> None:
        """Write a prepared state; may be called in a thread of the format.

        Args:
            takes_folder: whether the folder belongs to another run, or to none, until this save.
        """
        if not self.save_to_disk:  # this rank only takes part in a collective format
            self.format.write(state, path)
            return
        run_id_file = os.path.join(self.save_dir, RUN_ID)
        if takes_folder:
            # without it, the folder belongs to the run of the file that is tagged
            with contextlib.suppress(FileNotFoundError):
                os.remove(run_id_file)
        self.format.write(state, path)
        if tag_last:
            self.tag_last_checkpoint(os.path.basename(path))
        if takes_folder:
            write_text(self._run_id, run_id_file)
        if tag_last:
            self._run_id = ""  # from now on the folder says it
        sync_folder(self.save_dir)
        if on_commit is not None:
            on_commit()
        tell_mirrors(self.save_dir)

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Make ``resume_or_load`` start from this file of ``save_dir``."""
        write_text(last_filename_basename, os.path.join(self.save_dir, "last_checkpoint"))

    def collect(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The state that a save would write now, with further ``entries``; every rank calls it."""
        state, _ = self._collect(entries)
        return state

    def describe_unwritable(self) -> str:
        """Which value a save could not write now, and why; "" if there is none.

        Nothing is written or exchanged.
        """
        if not self.save_dir:
            return ""
        _, errors = self._leave_out_unwritable(self._own_state())
        return str(errors[0]) if errors else ""

    def remove(self, name: str) -> None:
        """Remove a file, such as an old best checkpoint, if it is there.

        Every rank may call it. Raises OSError.
        """
        if self.save_to_disk:
            with contextlib.suppress(FileNotFoundError):
                self.format.remove(os.path.join(self.save_dir, name + SUFFIX))

    def wait(self) -> None:
        """Wait until nothing is being written; raises the error of an asynchronous save, once."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def _wait_without_raising(self) -> None:
        if self._writing is not None:
            futures.wait([self._writing])

    def has_checkpoint(self) -> bool:
        """Whether there is a run to resume."""
        return bool(self.get_checkpoint_file())

    def get_checkpoint_file(self) -> str:
        """Path of the file that ``last_checkpoint`` names, else of the newest one.

        ``""`` if there is no run.
        """
        self._wait_without_raising()
        return next(candidates(self.save_dir, self._load_file), "")

    def load(
        self,
        path: _Path | None,
        checkpointables: Iterable[str] | None = None,
        *,
        strict: bool = False,
    ) -> dict[str, Any]:
        """Load a file of trainkit or fvcore, or the state dict of a model.

        A rank may call it alone.

        Args:
            path: None and ``""`` load nothing.
            checkpointables: the keys to load besides the model; None: all.
            strict: whether different model keys and a missing checkpointable are errors; else they
                are logged.

        Returns:
            The entries of the file that were not used.

        Raises:
            CheckpointError: the file is missing, damaged, refused (nothing is loaded then), or does
                not fit.
        """
        if not path:
            # without a folder, this is no start of a run: the weights are to be used
            level = logging.INFO if self.save_dir else logging.WARNING
            _logger.log(level, "No checkpoint to load; the model stays as it is")
            if self.has_checkpoint():
                _logger.warning(
                    "The model has the weights that it was built with, though there are "
                    "checkpoints in '%s'. To load the last one, call resume_or_load(\"\", "
                    "resume=True), on the command line --resume",
                    self.save_dir,
                )
            return {}
        self._wait_without_raising()
        if checkpointables is None:
            checkpointables = self.checkpointables
        keys = [*checkpointables]
        local_path = self._local_path(path)
        state = self._read(local_path, keys)
        return self._load_state(state, local_path, keys, strict)

    def resume_or_load(self, path: _Path | None, *, resume: bool = True) -> dict[str, Any]:
        """Resume everything from the last checkpoint in ``save_dir``.

        If there is none, or ``resume`` is False, load only the model from ``path``.

        If the last checkpoint is damaged, or ``last_checkpoint`` is missing, the newest intact one
        of the same run is used, with a warning. Every rank calls it; rank 0 lists the files for
        all. Returns and raises as :meth:`load`.
        """
        self._wait_without_raising()
        self.resumed_from = ""
        if resume:
            self._run_id = ""
            last, state = self._choose_last()
            if last:
                self.resumed_from = os.path.basename(last)
                self._run_id = run_id_of(state)
                return self._load_state(state, last, [*self.checkpointables], strict=True)
            start = f"; starting from '{path}'" if path else ""
            _logger.info("No checkpoint to resume from in '%s'%s", self.save_dir, start)
            older = [*Path(self.save_dir or os.devnull).glob("previous_*/last_checkpoint")]
            if older:
                _logger.warning(
                    "There is a checkpoint in '%s', to which a start without resume has moved it; "
                    "to go on from it, use this folder as OUTPUT_DIR",
                    max(older, key=os.path.getmtime).parent,
                )
        else:
            self._run_id = new_run_id()
        if not path:
            return self.load(path)
        local_path = together(partial(self._local_path, path))
        state = together(partial(self._read, local_path, []))
        return self._load_state(state, local_path, [], strict=False)

    def _choose_last(self) -> tuple[str, Any]:
        """Path and content of the checkpoint to resume from; ``""`` and None if there is no run."""
        keys = [*self.checkpointables]

        def read(path: str) -> dict[str, Any]:
            return together(partial(self._read, path, keys, needs_all=True))

        last, state = choose(self._candidates(), read)
        if last and comm.is_main_process() and not tagged_file(self.save_dir):
            _logger.warning(
                "'%s' has no last_checkpoint; resuming from its newest checkpoint, '%s'",
                self.save_dir,
                os.path.basename(last),
            )
        return last, state

    def _candidates(self) -> Iterator[str]:
        """The `candidates` that rank 0 finds, one by one on every rank."""
        paths = candidates(self.save_dir, self._load_file)

        def find_next() -> str:
            return next(paths, "") if comm.is_main_process() else ""

        while True:
            path = comm.broadcast(together(find_next))
            if not path:
                return
            yield path

    def _local_path(self, path: _Path) -> str:
        """The path of a local file; one at an address is downloaded."""
        try:
            # without such a project there are still http addresses
            if "://" in os.fspath(path) and "register_addresses" in find_plugins().names:
                load("register_addresses")(self.path_manager)
            return str(self.path_manager.get_local_path(os.fspath(path)))
        except Exception as error:  # each file system raises its own types
            raise CheckpointError(f"'{path}' cannot be downloaded: {error}") from error

    def _read(self, path: str, keys: list[str], *, needs_all: bool = False) -> dict[str, Any]:
        """The content of a checkpoint, for this rank, with the parts that are in further files.

        Args:
            keys: of the checkpointables that will be loaded.
            needs_all: whether it is an error if one of them is not in the file.
        """
        state = self._load_file(path)
        try:
            if not isinstance(state.get("model"), Mapping):
                _check_is_weights(state, path)
                state = {"model": state}
            if needs_all:
                _check_has_all(state, keys, path)
            by_rank = state.pop("ranks", None)
            if any(getattr(self.checkpointables[key], "rank_keys", ()) for key in keys):
                take_rank_state(state, by_rank, path)
            return format_of(state).fill(state, path, self.model, self._paths_to_read(keys))
        except CheckpointError:
            raise
        except Exception as error:  # entries of any type
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"'{path}' is no checkpoint of trainkit ({reason})") from error

    def _paths_to_read(self, keys: list[str]) -> list[str]:
        """The starts of the paths in a state that are needed for loading these checkpointables."""
        paths = ["model."]
        for key in keys:
            paths.append(f"{key}.")
        if keys:
            paths.append("trained_model.")
        for obj in self.checkpointables.values():
            paths.extend(getattr(obj, "paths_read", ()))
        return paths

    def _load_file(self, filename: str) -> dict[str, Any]:
        """The content of a file: a dict with the weights under "model", or the weights alone.

        Called on each rank.
        """
        suffix = os.path.splitext(filename)[1][1:]
        is_named_format = suffix in find_plugins().formats
        file_format = make_format(suffix) if is_named_format else self.format
        content: dict[str, Any] = file_format.read(filename)
        return content

    def _load_state(
        self, state: dict[str, Any], path: str, keys: list[str], strict: bool
    ) -> dict[str, Any]:
        """Load the content of a file; returns the entries that were not used.

        Args:
            state: of `_read`.
            path: of the file, for messages.
            keys: of the checkpointables to load besides the model.
            strict: see `load`.
        """
        state.pop(RUN_ID, None)
        # beside ``model``, if this has other weights for evaluation, such as averages
        trained_weights = state.pop("trained_model", None)
        with loading(f"'{path}'"):
            if trained_weights and not self._only_evaluates(keys):
                state["model"] = trained_weights
            for obj in self.checkpointables.values():
                if hasattr(obj, "after_load"):
                    obj.after_load(state)
        keys, self._is_strict = _what_to_load(state, path, keys, strict)
        self._not_loaded = []
        groups = state.pop("optimizer_groups", {})
        for key in keys:
            with loading(f"'{path}': its entry {key!r}"):
                self._check_entry(key, state[key], groups)
        with loading(f"'{path}': its entry 'model'"):
            incompatible = self._load_model(state)
            if incompatible is not None:
                self._log_incompatible_keys(incompatible)
        self.has_loaded = True
        state.pop("model", None)
        for key in keys:
            with loading(f"'{path}': its entry {key!r}"):
                self._load_entry(key, state.pop(key), groups)
        _logger.info("Loaded %s%s", path, _progress(state.get("iteration")))
        return state

    def _only_evaluates(self, keys: list[str]) -> bool:
        """Whether the model is loaded for evaluation, not for training."""
        return all(getattr(self.checkpointables[key], "only_evaluates", False) for key in keys)

    def _check_entry(self, key: str, state: Any, groups: Mapping[str, Any]) -> None:
        """Raises CheckpointError if a state does not fit.

        This finds what can be known before anything is loaded.
        """
        obj = self.checkpointables[key]
        if isinstance(obj, Optimizer):
            fit_state(obj, state, groups.get(key, []), self._parameter_names())
        elif hasattr(obj, "check_state_dict"):
            obj.check_state_dict(state)

    def _load_model(self, checkpoint: dict[str, Any]) -> Any:
        """Load the entry "model" into the model.

        Returns what ``_log_incompatible_keys`` logs, or None.
        """
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

    def check_complete(self) -> None:
        """Call after a load, before the model is evaluated or used.

        Raises:
            CheckpointError: the last load has left weights of the model as they were built.
        """
        names = self._not_loaded
        if names:
            raise CheckpointError(
                f"the checkpoint gives no values for {len(names)} weights of the model, which are "
                f"as they were built: {', '.join(names[:5])}. Build the model as in the run, such "
                "as by --config-file RUN/config.yaml"
            )

    def _log_incompatible_keys(self, incompatible: Any) -> None:
        # fvcore's would color names, which come from a file of somebody else
        for name, saved, own in incompatible.incorrect_shapes:
            _logger.warning(
                "The weight %r is left out: it has the shape %s in the checkpoint and %s in the "
                "model",
                name,
                saved,
                own,
            )
            self._not_loaded.append(name)
        missing = _filter_reused_missing_keys(self.model, incompatible.missing_keys)
        missing = set(missing) - set(self._not_loaded)  # those are there, in another shape
        self._not_loaded += sorted(missing)
        if missing:
            text = "The checkpoint does not have these weights, which stay as they are: %s"
            _logger.warning(text, ", ".join(sorted(missing)))
        if incompatible.unexpected_keys:
            text = "The model does not have these weights of the checkpoint: %s"
            _logger.warning(text, ", ".join(sorted(map(str, incompatible.unexpected_keys))))

    def _load_entry(self, key: str, state: Any, groups: Mapping[str, Any]) -> None:
        obj = self.checkpointables[key]
        if not isinstance(obj, Optimizer):
            obj.load_state_dict(state)
            return
        adapt = getattr(self.model, "optimizer_state_to_load", None)
        load_optimizer(obj, state, groups.get(key, []), self._parameter_names(), adapt)


def _progress(iteration: object) -> str:
    """The progress at the save, for a log line; iterations count from 0, as in names of files."""
    return f", {say_done(iteration + 1)}" if isinstance(iteration, int) else ""


def _what_to_load(
    state: dict[str, Any], path: str, keys: list[str], strict: bool
) -> tuple[list[str], bool]:
    """The keys whose states the file has, and whether it must have all weights; warns of the rest.

    Args:
        state: of the file; loses its entry ``left_out``.
        path, keys, strict: as in `Checkpointer._load_state`. With ``strict`` a key without a state
            stays, so that loading it fails, unless its state was left out at the save.
    """
    left_out = _left_out_of(state)
    state.pop("left_out", None)
    if left_out:
        _logger.warning(
            "'%s' was written without these states, which start anew: they held values that "
            "a file cannot hold: %s",
            path,
            ", ".join(left_out),
        )
        incomplete = _owners(left_out)
        keys = [key for key in keys if key in state or key not in incomplete]
        strict = strict and "model" not in incomplete
    absent = [key for key in keys if key not in state]
    if absent and not strict:
        _logger.warning("'%s' holds no state for %s, which stay as they are", path, absent)
        keys = [key for key in keys if key in state]
    return keys, strict


def _check_is_weights(state: Mapping[str, Any], path: str) -> None:
    """Raises CheckpointError if this is not the state dict of a model."""
    for key, value in state.items():
        if isinstance(value, Mapping) and "_extra_state" not in str(key):
            raise CheckpointError(
                f"'{path}' has entries {[*state]}, no 'model'; save a file of the weights alone"
            )


def _check_has_all(state: Mapping[str, Any], keys: list[str], path: str) -> None:
    """Raises CheckpointError if there is no state for a key, and it was not left out either."""
    left_out = _owners(_left_out_of(state))
    absent = [key for key in keys if key not in state and key not in left_out]
    if absent:
        raise CheckpointError(
            f"'{path}' holds no state for {absent}; it can be MODEL.WEIGHTS of a new run"
        )


def _left_out_of(state: Mapping[str, Any]) -> list[str]:
    """The paths of the values because of which states are not in the file."""
    paths = state.get("left_out")
    return [str(path) for path in paths] if isinstance(paths, list) else []


def _owners(paths: Iterable[str]) -> set[str]:
    """The entries of a file in which these paths start."""
    return {path.partition(".")[0] for path in paths}
