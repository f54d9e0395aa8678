"""Weights in files of safetensors."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainkit.checkpoint.atomic import replacing
from trainkit.checkpoint.errors import CheckpointError
from trainkit.checkpoint.format import FORMAT_REGISTRY, CheckpointFormat
from trainkit.utils.file_io import refuse_pipe


class SafetensorsFormat(CheckpointFormat):
    """A file of tensors by name: the model's weights. `MODEL.WEIGHTS` finds it by the suffix of the file."""

    def write(self, state: Mapping[str, Any], path: str) -> None:
        """Write ``state["model"]``; tied weights are stored under each of their names. Raises TypeError too."""
        weights = {}
        others = []
        for name, weight in state["model"].items():
            if isinstance(weight, torch.Tensor):
                weights[name] = weight.clone().contiguous()
            else:
                others.append(name)
        if others:
            raise TypeError(f"safetensors takes tensors alone, not {others}")
        content = import_safetensors().save(weights)
        with replacing(path) as output:
            output.write(content)

    def read(self, path: str) -> dict[str, Any]:
        try:
            refuse_pipe(path)
            with open(path, "rb") as file:
                return {"model": import_safetensors().load(file.read())}
        except CheckpointError:
            raise
        # a SafetensorError, a KeyError for a dtype that torch does not have, ...
        except Exception as error:
            raise CheckpointError(f"'{path}' cannot be read as safetensors: {error}") from error


def import_safetensors() -> Any:
    """The module of safetensors for torch. Raises CheckpointError if the package is missing."""
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise CheckpointError(
            "this needs the package safetensors: pip install 'trainkit[safetensors]'"
        ) from None


@FORMAT_REGISTRY.register()
def safetensors(model: nn.Module | None) -> CheckpointFormat:
    """The builder for `FORMAT_REGISTRY`; its name is the suffix of the files."""
    return SafetensorsFormat()
