"""Files of other programs that load only by running their code."""

import os
import pickle
from typing import Any

import torch

from trainkit.checkpoint.errors import CheckpointError
from trainkit.utils.file_io import refuse_pipe


def load_trusted_pickle(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a pickle, or any file of ``torch.save``. **This runs code from the file**, with all your rights.

    Use it in your own `Checkpointer._load_file`, and only for files that you trust.
    """
    try:
        refuse_pipe(path)
        with open(path, "rb") as file:
            is_archive = file.read(2) == b"PK"
            file.seek(0)
            # latin1 for pickles of Python 2
            state = None if is_archive else pickle.load(file, encoding="latin1")
            if is_archive or state == torch.serialization.MAGIC_NUMBER:
                file.seek(0)
                state = torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:  # code in the file may raise anything
        raise CheckpointError(
            f"'{path}' cannot be read as a pickle: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"'{path}' holds a {type(state).__name__}; save a dict, of a module its state_dict()"
        )
    return state
