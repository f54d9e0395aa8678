"""The folders of a run.

Their paths are absolute, they are locked for this run, and the files of an earlier run are moved
away.
"""

import contextlib
import os
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.atomic import remove_leftovers, write_text
from trainkit.checkpoint.folder import candidates, is_file_of, next_previous
from trainkit.checkpoint.format import owner_of_part
from trainkit.checkpoint.mirror import local_folder, mirror_of
from trainkit.config import CfgNode, ConfigError
from trainkit.utils import comm
from trainkit.utils.run_folder import (
    is_in_use,
    leave_folder,
    own_folder,
    release_folder,
    use_folder,
)

# the files of a run in its output folder
_RUN_FILES = re.compile(
    r"log\.txt|.+\.rank\d+(\.pt)?|config\.yaml|batch\.json|confusion_.+\.json"
    r"|metrics\.(json|csv)(\.cut_\d+)?|last_checkpoint|run_id|finished|slurm_job|.+\.pth"
    r"|.+_published-\w{8}\.safetensors|events\.out\.tfevents\..+|events\.cut_\d+"
)

# those of them that `prepare_folders` and the log write, maybe for a run of this process that has
# not started
_FILES_OF_SETUP = re.compile(r"log\.txt(\.rank\d+)?|config\.yaml|slurm_job")

# the name of ``previous_<n>`` until all files are in it
_MOVING = "previous_unfinished"

# real path of a folder -> the trainer of this process that has trained there last, since
# `prepare_folders`
_last_trainers: "dict[str, weakref.ref[Any]]" = {}


def checkpoint_dir(cfg: CfgNode) -> str:
    """The folder of a run's checkpoints."""
    return cfg.CHECKPOINT.DIR or cfg.OUTPUT_DIR


def use_local_folders(cfg: CfgNode) -> None:
    """Make OUTPUT_DIR and CHECKPOINT.DIR absolute.

    An address becomes a local folder, whose files are uploaded.
    """
    # by item, since the config may be frozen
    cfg["OUTPUT_DIR"] = _absolute(cfg.OUTPUT_DIR)
    cfg.CHECKPOINT["DIR"] = _absolute(cfg.CHECKPOINT.DIR)


def _absolute(folder: str) -> str:
    if not folder:
        return folder
    return os.path.abspath(os.path.expanduser(local_folder(folder)))


def _folders_of(cfg: CfgNode) -> dict[str, str]:
    """Key -> folder; one key if it is the same folder.

    The checkpoints are first: if a new run is killed before all files of an earlier one are moved
    away, no run goes on from a checkpoint whose metrics are elsewhere.
    """
    folders = {}
    if os.path.realpath(checkpoint_dir(cfg)) != os.path.realpath(cfg.OUTPUT_DIR):
        folders["CHECKPOINT.DIR"] = checkpoint_dir(cfg)
    folders["OUTPUT_DIR"] = cfg.OUTPUT_DIR
    return folders


def own_folders(
    cfg: CfgNode, resume: bool | None = None, own: Callable[[str], None] = own_folder
) -> list[str]:
    """Make and lock both folders for this run, on rank 0, by ``own(folder)``.

    Returns lines for the log.

    ``resume`` is for an address; None: as it was said before. Raises ConfigError if another run
    uses a folder or it cannot be written, and CheckpointError if an address cannot be used.
    """
    notes = []
    folders = _folders_of(cfg) if comm.is_main_process() else {}
    for key, folder in folders.items():
        try:
            own(folder)
        except OSError as error:
            raise ConfigError(
                f"{key} {folder!r} cannot be written, choose another: {error}"
            ) from error
        mirror = mirror_of(folder)
        if mirror is not None and not mirror.is_taken:
            mirror.take(resume)
            notes.append(
                f"Files are written to {folder}, and uploaded to {mirror.address} after each save"
            )
    return notes


def use_folders(cfg: CfgNode, trainer: Any, *, starts_over: bool, has_loaded: bool) -> list[str]:
    """Lock both folders for the training of ``trainer``, on rank 0; returns lines for the log.

    What another trainer of this process has written there since `prepare_folders` is moved away,
    unless this one goes on from it. `release_folders` ends the use; if this function raises,
    nothing is in use. Raises as `own_folders`.

    Args:
        starts_over: the trainer begins again with its first iteration, so its own files are moved
            away too.
        has_loaded: it goes on from a state that it has loaded.
    """
    used: list[str] = []

    def use(folder: str) -> None:
        use_folder(folder)
        used.append(folder)

    try:
        notes = own_folders(cfg, own=use)
        for folder in used:
            key = os.path.realpath(folder)
            former = _last_trainers.get(key)
            is_of_another = former is not None and former() is not trainer
            if former is not None and (starts_over or (is_of_another and not has_loaded)):
                aside = _move_aside(Path(folder), cfg.MODEL.WEIGHTS, True, keep=_FILES_OF_SETUP)
                notes += _note_of(folder, aside)
            _last_trainers[key] = weakref.ref(trainer)
    except BaseException:
        for folder in used:
            leave_folder(folder)
        raise
    return notes


def _note_of(folder: str, aside: Path | None) -> list[str]:
    if aside is None:
        return []
    return [f"The files of an earlier run in {folder} are now in {aside}"]


def release_folders(cfg: CfgNode, *, after_use: bool = False) -> None:
    """Unlock both folders, but those that another run of this process uses.

    Args:
        after_use: this run has used them.

    Raises:
        CheckpointError: the run has no error, but not all its files are at its address.
    """
    folders = list(_folders_of(cfg).values())
    if not after_use:
        folders = [folder for folder in folders if not is_in_use(folder)]
    errors = []
    for folder in folders:
        mirror = mirror_of(folder)
        if mirror is not None:
            error = mirror.release()
            if error:
                errors.append(error)
    for folder in folders:
        if after_use:
            leave_folder(folder)
        else:
            release_folder(folder)
    if errors and sys.exc_info()[0] is None:
        raise CheckpointError(f"the run is at its end, but {'; '.join(errors)}")


def prepare_folders(cfg: CfgNode, config: str, *, resume: bool, eval_only: bool) -> list[str]:
    """Make and lock both folders, and write ``config.yaml``.

    The files of an earlier run are moved away, unless it goes on.

    Rank 0 does it, and gets lines for the log. An evaluation only makes the folder, if it can. A
    run that goes on moves only links out of its folder, since it would write through them.
    """
    checkpoints = checkpoint_dir(cfg)
    folders = list(_folders_of(cfg).values()) if comm.is_main_process() else []
    if eval_only:
        for folder in folders:
            mirror = mirror_of(folder)
            if mirror is not None:
                mirror.download()
        with contextlib.suppress(OSError):  # it may belong to somebody else
            os.makedirs(cfg.OUTPUT_DIR, exist_ok=True)
    if eval_only or not folders:
        return []
    notes = own_folders(cfg, resume)
    was_killed = any(_is_half_empty(Path(folder)) for folder in folders)
    # only a run that resumes reads ``last_checkpoint``, which may be damaged
    goes_on = resume and not was_killed and any(candidates(checkpoints))
    is_new = not goes_on
    for folder in folders:
        os.makedirs(folder, exist_ok=True)
        remove_leftovers(folder)
        aside = _move_aside(Path(folder), cfg.MODEL.WEIGHTS, is_new)
        notes += _note_of(folder, aside)
        _last_trainers.pop(os.path.realpath(folder), None)
    write_text(config, Path(cfg.OUTPUT_DIR, "config.yaml"))
    return notes


def can_log(folder: str) -> bool:
    """Whether an evaluation can write a log there, and not through a link out of the folder."""
    return os.access(folder, os.W_OK) and is_file_of(folder, "log.txt")


def _is_half_empty(folder: Path) -> bool:
    """Whether a process was killed while it moved the files of an earlier run away."""
    moving = folder / _MOVING
    return moving.is_dir() and not moving.is_symlink()


def _move_aside(
    folder: Path, weights: str, is_new: bool, *, keep: "re.Pattern[str] | None" = None
) -> Path | None:
    """Move the files of a run into a new folder ``previous_<n>``.

    Returns the new folder; None if there are no files. A new run moves them into another folder,
    which gets this name at the end. So `_is_half_empty` sees whether the process was killed
    meanwhile, and the next call moves the rest.
    """
    old = []
    # a checkpoint after its further files, which are in a folder
    found = sorted(folder.iterdir(), key=lambda path: not path.is_dir())
    for path in found:
        is_of_run = _RUN_FILES.fullmatch(path.name) or owner_of_part(path.name)
        if not is_of_run or (keep is not None and keep.fullmatch(path.name)):
            continue
        if is_new:
            old.append(path)
        elif path.suffix != ".pth" and not is_file_of(str(folder), path.name):
            old.append(path)  # a link out of the folder: the run would write through it
    if weights and Path(weights).resolve() in [path.resolve() for path in old]:
        raise ConfigError(
            f"MODEL.WEIGHTS {weights!r} lies in OUTPUT_DIR, which a new run empties; move it"
        )
    moving = folder / _MOVING
    is_half_empty = _is_half_empty(folder)
    if is_half_empty and any(os.path.lexists(moving / path.name) for path in old):
        # an evaluation has written such a file since then
        moving.rename(next_previous(folder))
        is_half_empty = False
    if not old and not is_half_empty:
        return None
    aside = next_previous(folder)
    if not is_new:
        moving = aside  # only links, and the run goes on also if it is killed now
    moving.mkdir(exist_ok=is_half_empty)
    for path in old:
        path.rename(moving / path.name)
    moving.rename(aside)
    return aside
