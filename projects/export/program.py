"""A model as a program of torch.export or ONNX, and whether that gives the outputs of the model."""

import copy
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tabulate import tabulate
from torch import Tensor, nn

from trainkit.config import ConfigError

Program: TypeAlias = Callable[[dict[str, Tensor]], list[Tensor]]
"""Called with a batch; returns its outputs in one list."""

# sizes of the batches that are compared; the first batch is the example for the export
SIZES = (2, 1, 5)
RTOL = 1e-3
ATOL = 1e-5


def flat(outputs: Any, name: str = "output") -> dict[str, Tensor]:
    """The tensors in the output of a model, by name.

    Raises:
        ConfigError: the output has something else.
    """
    if isinstance(outputs, Tensor):
        return {name: outputs}
    found: dict[str, Tensor] = {}
    if isinstance(outputs, Mapping):
        for key, value in outputs.items():
            found.update(flat(value, str(key)))
        return found
    if isinstance(outputs, list | tuple):
        for i, value in enumerate(outputs):
            found.update(flat(value, f"{name}_{i}"))
        return found
    raise ConfigError(
        f"the model returns a {type(outputs).__name__} in eval mode; return tensors to have it "
        "exported"
    )


def example_batches(model: nn.Module, batch: Any) -> list[dict[str, Tensor]]:
    """Batches of `SIZES`, of samples in ``batch``, with the entries that the model needs.

    Raises:
        ConfigError: the batch is not a dict of tensors.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"the model takes a {type(batch).__name__}; only a dict of tensors can be exported"
        )
    needed = dict(batch)
    expected = flat(model(dict(needed)))
    for name in batch:
        without = {key: value for key, value in needed.items() if key != name}
        if without and _gives(model, without, expected):
            needed = without
    for name, value in needed.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"the model needs {name!r}, which is no tensor; only tensors can be exported"
            )
    batches = []
    for size in SIZES:
        batches.append({name: _resized(value, size) for name, value in needed.items()})
    return batches


def _resized(value: Tensor, size: int) -> Tensor:
    """Its first ``size`` samples; if there are fewer, from the start again."""
    return value[torch.arange(size) % len(value)]


def _gives(model: nn.Module, batch: dict[str, Any], expected: dict[str, Tensor]) -> bool:
    try:
        outputs = flat(model(dict(batch)))
    except Exception:  # a model without an entry that it needs may raise anything
        return False
    if list(outputs) != list(expected):
        return False
    return all(torch.equal(outputs[name], expected[name]) for name in expected)


def export(model: nn.Module, batch: dict[str, Tensor], path: Path) -> Program:
    """Export the model to ``path``, and load the file.

    Raises:
        ConfigError: the model cannot be exported, or a package is missing.
    """
    shapes = ({name: {0: torch.export.Dim("batch")} for name in batch},)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings for the developers of torch.export
            program = torch.export.export(copy.deepcopy(model), (batch,), dynamic_shapes=shapes)
            if path.suffix == ".onnx":
                return _to_onnx(program, batch, path, [*flat(model(dict(batch)))])
            torch.export.save(program, path)
    except ImportError as error:
        raise ConfigError(
            f"ONNX needs more packages ({error}): pip install 'trainkit[onnx]'"
        ) from error
    except Exception as error:  # torch.export raises many types
        raise ConfigError(
            "the model cannot be exported, change what torch.export does not understand: "
            f"{type(error).__name__}: {error}"
        ) from error
    loaded = torch.export.load(path).module()
    return lambda batch: list(flat(loaded(batch)).values())


def _to_onnx(program: Any, batch: dict[str, Tensor], path: Path, outputs: list[str]) -> Program:
    runtime = importlib.import_module("onnxruntime")
    torch.onnx.export(
        program,
        (batch,),
        path,
        dynamo=True,
        input_names=[*batch],
        output_names=outputs,
        dynamic_shapes=({name: {0: "batch"} for name in batch},),  # the name of the dimension
        verbose=False,
        external_data=False,
    )
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(batch: dict[str, Tensor]) -> list[Tensor]:
        inputs = {name: batch[name].numpy() for name in names}
        return [torch.from_numpy(array) for array in session.run(outputs, inputs)]

    return run


@dataclass
class _Row:
    """What is known of one output after some batches."""

    shape: str
    dtype: str
    differences: list[float] = field(default_factory=list)
    is_equal: bool = True


def compare(
    model: nn.Module, program: Program, batches: Sequence[dict[str, Tensor]]
) -> tuple[bool, str]:
    """Whether all outputs are equal within the tolerance, and a table with their differences."""
    rows: dict[str, _Row] = {}
    for batch in batches:
        expected = flat(model(dict(batch)))
        for (name, wanted), got in zip(expected.items(), program(batch), strict=True):
            if name not in rows:
                shape = ", ".join(map(str, ["batch", *wanted.shape[1:]]))
                rows[name] = _Row(f"[{shape}]", str(wanted.dtype).removeprefix("torch."))
            row = rows[name]
            if got.shape != wanted.shape or got.dtype != wanted.dtype:
                row.differences.append(float("nan"))
                row.is_equal = False
                continue
            row.differences.append((got.double() - wanted.double()).abs().max().item())
            if not torch.allclose(got, wanted, rtol=RTOL, atol=ATOL, equal_nan=True):
                row.is_equal = False
    table = []
    for name, row in rows.items():
        # NaN if one of them is
        largest = torch.tensor(row.differences, dtype=torch.float64).max().item()
        table.append([name, row.shape, row.dtype, largest, "yes" if row.is_equal else "NO"])
    are_equal = all(row.is_equal for row in rows.values())
    headers = ["output", "shape", "dtype", "largest difference", "equal"]
    return are_equal, tabulate(table, headers)
