#!/usr/bin/env python
"""Convert a pickle, such as a checkpoint of another program, to a plain checkpoint of trainkit.

::

    python tools/convert_checkpoint.py model_final.pkl model_final.pth

Both may be addresses of fsspec, such as ``s3://bucket/model.pkl``.

This runs the code in the first file: convert only files that you trust. The second file holds tensors and plain Python
values, and runs no code. NumPy arrays become tensors; entries that hold anything else are left out and named.
"""

import argparse
import os
import tempfile
from typing import Any

import numpy as np
import torch
from trainkit.projects.remote.store import register_addresses

from trainkit.checkpoint import CheckpointError, load_trusted_pickle
from trainkit.checkpoint.file import plain_state, write_file
from trainkit.engine import user_errors_exit
from trainkit.utils.file_io import PathManager


def convert(source: str, target: str) -> list[str]:
    """Write the tensors and plain values in ``source`` to ``target``; returns the entries left out, with the reason.

    Raises:
        CheckpointError: ``source`` cannot be read, or has no such values; ``target`` cannot be written.
    """
    register_addresses()
    kept: dict[str, Any] = {}
    left_out = []
    for key, value in load_trusted_pickle(PathManager.get_local_path(source)).items():
        try:
            kept |= plain_state({key: _without_numpy(value)})
        except TypeError as error:
            left_out.append(str(error))
    if not kept:
        raise CheckpointError(
            f"'{source}' holds no entry that can be kept; use another file: {'; '.join(left_out)}"
        )
    if "://" not in target:
        write_file(kept, target)
        return left_out
    with tempfile.TemporaryDirectory() as folder:
        write_file(kept, local := os.path.join(folder, "converted.pth"))
        try:
            PathManager.copy_from_local(local, target)
        except Exception as error:  # each file system raises its own types
            raise CheckpointError(f"'{target}' cannot be written: {error}") from error
    return left_out


def _without_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":  # such as texts and objects
            return value
        return torch.as_tensor(np.array(value, value.dtype.newbyteorder("="), order="C"))
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(_without_numpy, value))
    if isinstance(value, dict):
        return {key: _without_numpy(item) for key, item in value.items()}
    return value


def main(args: argparse.Namespace) -> None:
    with user_errors_exit():
        print(f"Code from {args.source} is run.")
        left_out = convert(args.source, args.target)
        print(*(f"Left out: {reason}" for reason in left_out), f"Wrote {args.target}.", sep="\n")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="IN.pkl", help="a pickle, or a file of torch.save; its code is run"
    )
    parser.add_argument("target", metavar="OUT.pth", help="the checkpoint to write")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse_args())
