#!/usr/bin/env python
"""Export a trained model to torch.export or ONNX, and check that the file gives the same outputs as the model.

::

    python tools/export.py output/digits digits.pt2
    python tools/export.py output/digits digits.onnx --dataset digits_test

RUN is the folder of a run: its config.yaml says what the model is, and its best checkpoint, or else its last one, has
the weights. The exported program takes a batch after the test transform, of any size, and gives what the model gives in
eval mode. Entries of a batch that only the losses need, such as labels, are no inputs. Examples come from the test
loader of the first test dataset, or of --dataset. --script names the file of a job in which a subclass of
DefaultTrainer builds the model.

The exit code is 0; 1 if the outputs differ by more than the tolerance; 2 for a mistake in the command or the config, or
if the model cannot be exported. ONNX needs pip install 'trainkit[onnx]'.
"""

import argparse
import copy
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tabulate import tabulate
from torch import Tensor, nn
from user_job import SCRIPT_HELP, find_trainer

from predict import ROOT, build_cfg, check_writable
from trainkit.config import CfgNode, ConfigError, import_modules
from trainkit.engine import DefaultPredictor, user_errors_exit

Program: TypeAlias = Callable[[dict[str, Tensor]], list[Tensor]]  # batch -> its outputs in one list

# sizes of the batches that are compared; the first batch is the example for the export
_SIZES = (
    2,
    1,
    5,
)
_RTOL, _ATOL = 1e-3, 1e-5


def flat(outputs: Any, name: str = "output") -> dict[str, Tensor]:
    """The tensors in the output of a model, by name.

    Raises:
        ConfigError: the output has something else.
    """
    if isinstance(outputs, Tensor):
        return {name: outputs}
    if isinstance(outputs, Mapping):
        return {
            found: t for key, value in outputs.items() for found, t in flat(value, str(key)).items()
        }
    if isinstance(outputs, list | tuple):
        return {
            found: t
            for i, value in enumerate(outputs)
            for found, t in flat(value, f"{name}_{i}").items()
        }
    raise ConfigError(
        f"the model returns a {type(outputs).__name__} in eval mode; return tensors to have it exported"
    )


def example_batches(model: nn.Module, batch: Any) -> list[dict[str, Tensor]]:
    """Batches of the sizes that are compared, of samples in ``batch``, with the entries that the model needs.

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
    if wrong := [name for name, value in needed.items() if not isinstance(value, Tensor)]:
        raise ConfigError(
            f"the model needs {wrong[0]!r}, which is no tensor; only tensors can be exported"
        )
    return [
        {name: value[torch.arange(size) % len(value)] for name, value in needed.items()}
        for size in _SIZES
    ]


def _gives(model: nn.Module, batch: dict[str, Any], expected: dict[str, Tensor]) -> bool:
    try:
        outputs = flat(model(dict(batch)))
    except Exception:  # a model without an entry that it needs may raise anything
        return False
    return [*outputs] == [*expected] and all(
        torch.equal(outputs[name], expected[name]) for name in expected
    )


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
    return lambda batch: [*flat(loaded(batch)).values()]


def _to_onnx(program: Any, batch: dict[str, Tensor], path: Path, outputs: list[str]) -> Program:
    runtime = importlib.import_module("onnxruntime")
    torch.onnx.export(
        program, (batch,), path, dynamo=True, input_names=[*batch], output_names=outputs, verbose=False,
        external_data=False,
    )  # fmt: skip
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(batch: dict[str, Tensor]) -> list[Tensor]:
        return [
            torch.from_numpy(array)
            for array in session.run(outputs, {name: batch[name].numpy() for name in names})
        ]

    return run


def compare(
    model: nn.Module, program: Program, batches: Sequence[dict[str, Tensor]]
) -> tuple[bool, str]:
    """Whether all outputs are equal within the tolerance, and a table with the largest difference of each."""
    rows: dict[str, list[Any]] = {}
    all_equal = True
    for batch in batches:
        expected = flat(model(dict(batch)))
        for (name, wanted), got in zip(expected.items(), program(batch), strict=True):
            fits = got.shape == wanted.shape and got.dtype == wanted.dtype
            difference = (
                (got.double() - wanted.double()).abs().max().item() if fits else float("nan")
            )
            is_equal = fits and torch.allclose(got, wanted, rtol=_RTOL, atol=_ATOL, equal_nan=True)
            all_equal &= is_equal
            row = rows.setdefault(
                name, [name, ["batch", *wanted.shape[1:]], str(wanted.dtype)[6:], 0.0, "yes"]
            )
            row[3] = max(row[3], difference) if difference == difference else difference
            row[4] = row[4] if is_equal else "NO"
    table = [
        [name, f"[{', '.join(map(str, shape))}]", *rest] for name, shape, *rest in rows.values()
    ]
    return all_equal, tabulate(table, ["output", "shape", "dtype", "largest difference", "equal"])


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, and the file by its suffix."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "output", type=Path, metavar="FILE", help="to write: .pt2 for torch.export, .onnx for ONNX"
    )
    parser.add_argument(
        "--weights", default="", help="a checkpoint (default: the best one of the run, or its last)"
    )
    parser.add_argument("--script", default="", metavar="SCRIPT", help=SCRIPT_HELP)
    parser.add_argument(
        "--dataset",
        default="",
        help="whose first samples are the examples (default: DATASETS.TEST)",
    )
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="changes to the config")
    return parser.parse_args(args)


def build(args: argparse.Namespace) -> CfgNode:
    """The config of the run, on a CPU.

    Raises:
        ConfigError: a mistake in the command.
    """
    if args.output.suffix not in (".pt2", ".onnx"):
        raise ConfigError(
            f"the file {str(args.output)!r} has the suffix {args.output.suffix!r}; accepted: .pt2, .onnx"
        )
    check_writable(str(args.output))
    own = [
        "MODEL.DEVICE",
        "cpu",
        "DATALOADER.NUM_WORKERS",
        "0",
        "TEST.IMS_PER_BATCH",
        str(max(_SIZES)),
    ]
    args.config_file, args.opts = "", [*args.opts, *own]
    cfg = build_cfg(args)
    import_modules(cfg.IMPORTS)
    args.dataset = args.dataset or next(iter(cfg.DATASETS.TEST), "")
    if not args.dataset:
        raise ConfigError(
            "DATASETS.TEST is empty, so there are no examples; name a dataset with --dataset"
        )
    return cfg


@torch.no_grad()
def main(args: argparse.Namespace) -> int:
    """The exit code."""
    cfg = build(args)
    trainer = find_trainer(cfg, args.script)
    model = DefaultPredictor(cfg, trainer.build_model).model
    batches = example_batches(model, next(iter(trainer.build_test_loader(cfg, args.dataset))))
    program = export(model, batches[0], args.output)
    is_equal, table = compare(model, program, batches)
    inputs = ", ".join(
        f"{name} [{', '.join(['batch', *map(str, x.shape[1:])])}]" for name, x in batches[0].items()
    )
    print(
        f"weights  {cfg.MODEL.WEIGHTS}\nfile     {args.output}, {args.output.stat().st_size:,} bytes"
    )
    print(f"inputs   {inputs}\n\n{table}")
    if not is_equal:
        print(
            f"The outputs differ by more than {_RTOL} of a value, or {_ATOL}: do not use the file"
        )
    return int(not is_equal)


if __name__ == "__main__":
    # so that IMPORTS can name projects, and modules in the current folder
    sys.path += [
        str(ROOT),
        str(Path.cwd()),
    ]
    with user_errors_exit():
        sys.exit(main(parse_args()))
