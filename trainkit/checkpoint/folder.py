"""Find the checkpoints of a folder, and the one to resume from.

A run draws a random text, its ``run_id``. It is in each of its checkpoints and in a file of its
folder, so that a copy of another run's checkpoint is not taken for one of this run. A folder
without this file belongs to the run whose checkpoint ``last_checkpoint`` names.
"""

import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainkit.checkpoint.errors import CheckpointError
from trainkit.checkpoint.file import SUFFIX, read_file
from trainkit.checkpoint.mirror import mirror_of
from trainkit.utils.file_io import refuse_pipe

_logger = logging.getLogger(__name__)

RUN_ID = "run_id"
"""The name of the file in the folder, and of the entry of a checkpoint."""


def checkpoint_files(folder: str) -> list[str]:
    """Paths of all ``.pth`` files, sorted by name; none if the folder does not exist."""
    if not os.path.isdir(folder):
        return []
    paths = []
    for name in sorted(os.listdir(folder)):
        is_hidden = name.startswith(".")  # such as a file that is being written
        if name.endswith(SUFFIX) and not is_hidden:
            paths.append(os.path.join(folder, name))
    return paths


class Header(NamedTuple):
    """What a checkpoint says about itself: its last iteration (else -1), and its run (else "")."""

    iteration: int
    run_id: str


def candidates(folder: str, read: Callable[[str], Any] = read_file) -> Iterator[str]:
    """The checkpoints to resume from, in the order in which to try them; none if there is no run.

    First the file that ``last_checkpoint`` names, then the earlier ones of the same run, the newest
    first, then later ones, which the run has left behind. At the end, those that cannot be read.
    A folder that stands for a remote address is filled from there first.

    Args:
        read: returns the content of a file in another format than that of torch.

    Raises:
        CheckpointError: as `tagged_file`; ``last_checkpoint`` names a file of another run than the
            file ``run_id``; nothing says to which of several runs the folder belongs.
    """
    mirror = mirror_of(folder)
    if mirror is not None:
        mirror.download()
    tagged = tagged_file(folder)
    run_id = read_run_id(folder)
    last_iteration = -1  # not known
    if tagged:
        header = read_header(tagged, read)
        if header is None:
            header = Header(_iteration_in_name(tagged), run_id="")
        if run_id and header.run_id not in ("", run_id):
            raise CheckpointError(
                f"last_checkpoint in '{folder}' names {os.path.basename(tagged)!r}, a file of "
                f"another run. Name a file of this run there; or delete the file {RUN_ID} to go "
                "on with the other run here"
            )
        run_id = run_id or header.run_id
        last_iteration = header.iteration
        yield tagged

    others = [path for path in checkpoint_files(folder) if path != tagged]
    headers, damaged = _read_headers(others, read)
    own = _files_of_run(folder, headers, run_id)
    yield from _in_order_to_try(own, headers, last_iteration)
    if tagged or run_id or own:
        yield from reversed(damaged)  # for their errors


def _read_headers(
    paths: Iterable[str], read: Callable[[str], Any]
) -> tuple[dict[str, Header], list[str]]:
    """path -> header, of the checkpoints with more than weights; and the files that are damaged."""
    headers: dict[str, Header] = {}
    damaged = []
    for path in paths:
        header = read_header(path, read)
        if header is None:
            damaged.append(path)
        elif header.run_id or header.iteration >= 0:
            headers[path] = header
    return headers, damaged


def _in_order_to_try(
    paths: Iterable[str], headers: Mapping[str, Header], last_iteration: int
) -> list[str]:
    """The newest first, and at the end those that are later than the last iteration of the run.

    Of one iteration: "model_final", "model_best", the number.

    Args:
        last_iteration: -1: not known.
    """
    newest_first = sorted(paths, key=lambda path: (headers[path].iteration, path), reverse=True)
    if last_iteration < 0:
        return newest_first
    earlier = []
    later = []
    for path in newest_first:
        if headers[path].iteration > last_iteration:
            later.append(path)
        else:
            earlier.append(path)
    return earlier + later


def _files_of_run(folder: str, headers: Mapping[str, Header], run_id: str) -> list[str]:
    """The files of this run; ``run_id`` "": of the only run that there is."""
    if not run_id:
        run_ids = {header.run_id for header in headers.values()}
        if len(run_ids) > 1:
            raise CheckpointError(
                f"'{folder}' has checkpoints of several runs: {_names(headers)}. Write the name "
                "of the file to go on from into last_checkpoint"
            )
        return list(headers)
    own = []
    others = []
    for path, header in headers.items():
        if header.run_id == run_id:
            own.append(path)
        else:
            others.append(path)
    if others:
        _logger.warning("'%s' has files of another run, not used: %s", folder, _names(others))
    return own


def _iteration_in_name(path: str) -> int:
    """99 of ``model_0000099.pth``; -1 of other names."""
    match = re.search(r"_(\d{7,})\.pth$", path)
    return int(match[1]) if match else -1


def _names(paths: Iterable[str]) -> str:
    return ", ".join(repr(os.path.basename(path)) for path in paths)


def read_header(path: str, read: Callable[[str], Any] = read_file) -> Header | None:
    """The header of a checkpoint; None if the file cannot be read.

    A file of torch is not searched for damage. Others are read by ``read``.
    """
    if not os.path.isfile(path):
        return None
    try:
        # `mmap`: the content of tensors is not read
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # torch and pickle raise many types
        try:
            state = read(path)
        except CheckpointError:
            return None
    iteration = state.get("iteration") if isinstance(state, dict) else None
    if type(iteration) is not int:
        iteration = -1
    return Header(iteration, run_id_of(state))


def run_id_of(state: Any) -> str:
    """The run that has written a checkpoint; "" if it does not say it."""
    run_id = state.get(RUN_ID) if isinstance(state, dict) else None
    return run_id if isinstance(run_id, str) else ""


def new_run_id() -> str:
    return secrets.token_hex(8)


def read_run_id(folder: str) -> str:
    """The run to which a folder belongs; "" if it does not say it."""
    path = os.path.join(folder, RUN_ID)
    if not os.path.isfile(path) or not is_file_of(folder, RUN_ID):
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def tagged_file(folder: str) -> str:
    """Path of the file that ``last_checkpoint`` names, which may not exist; ``""`` without a name.

    Raises:
        CheckpointError: it holds no file name, or leads out of the folder.
    """
    tag_file = os.path.join(folder, "last_checkpoint")
    if not folder or not os.path.lexists(tag_file):
        return ""
    # do not read it, since errors would show its content
    if not is_file_of(folder, "last_checkpoint"):
        raise CheckpointError(f"'{tag_file}' is a link out of its folder; delete it")
    try:
        refuse_pipe(tag_file)
        with open(tag_file, encoding="utf-8", errors="replace") as file:
            name = file.read().strip()
    except OSError as error:
        raise CheckpointError(f"cannot read '{tag_file}': {error.strerror or error}") from error
    if not name:
        return ""
    if not is_file_of(folder, name):
        raise CheckpointError(
            f"'{tag_file}' names {name!r:.200}; it has to hold the bare name of a file in its "
            "folder"
        )
    return os.path.join(folder, name)


def choose(paths: Iterable[str], read: Callable[[str], Any] = read_file) -> tuple[str, Any]:
    """Path and content of the first of the `candidates` that ``read`` can read.

    ``""`` and None if there are no candidates.

    Raises:
        CheckpointError: there are candidates, but none is intact.
    """
    broken: list[str] = []
    for path in paths:
        try:
            content = read(path)
        except CheckpointError as error:
            broken.append(str(error))
            continue
        if broken:
            _logger.warning("Resuming from '%s' instead, because %s", path, "; ".join(broken))
        return path, content
    if broken:
        raise CheckpointError(
            f"no checkpoint is intact: {'; '.join(broken)}. To start a new run, leave out --resume"
        )
    return "", None


def read_finished(folder: str) -> Any:
    """What a finished run has written into the file ``finished``.

    None if the file is missing or damaged.
    """
    try:
        path = os.path.join(folder, "finished")
        refuse_pipe(path)
        with open(path, "rb") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def next_previous(folder: Path) -> Path:
    """The path of the next folder ``previous_<n>`` for files that make room."""
    n = 1
    while os.path.lexists(folder / f"previous_{n}"):
        n += 1
    return folder / f"previous_{n}"


def is_file_of(folder: str, name: str) -> bool:
    """Whether ``name`` is a file name without a path, and not a link out of ``folder``.

    The file need not exist.
    """
    if not name.isprintable() or name in (os.curdir, os.pardir):
        return False
    if os.path.basename(name) != name:
        return False
    real_path = os.path.realpath(os.path.join(folder, name))
    return os.path.dirname(real_path) == os.path.realpath(folder)
