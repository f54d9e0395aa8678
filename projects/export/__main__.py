"""Export a trained model, and check that the file holds what the model holds.

::

    python -m trainkit.projects.export output/digits digits.pt2
    python -m trainkit.projects.export output/digits digits.onnx --dataset digits_test
    python -m trainkit.projects.export output/digits digits.safetensors

RUN is the folder of a run: its config.yaml says what the model is, and its best checkpoint, or else
its last one, has the weights. --script names the file of a job in which a subclass of
DefaultTrainer builds the model.

  .pt2           a program of torch.export
  .onnx          ONNX; needs pip install 'trainkit[onnx]'
  .safetensors   the weights alone, by the names of the model's state_dict; needs
                 pip install 'trainkit[safetensors]'

A program takes a batch after the test transform, of any size, and gives what the model gives in
eval mode. Entries of a batch that only the losses need, such as labels, are no inputs. Examples
come from the test loader of the first test dataset, or of --dataset.

The exit code is 0; 1 if the outputs differ by more than the tolerance, or a weight at all; 2 for a
mistake in the command or the config, or if the model cannot be exported.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from trainkit.projects.export.program import (
    ATOL,
    RTOL,
    SIZES,
    compare,
    example_batches,
    export,
)
from trainkit.projects.finders.command import check_writable
from trainkit.projects.finders.script import SCRIPT_HELP, find_trainer
from trainkit.projects.predict.predictor import DefaultPredictor
from trainkit.projects.predict.run import cfg_of_run

from trainkit.checkpoint.format import make_format
from trainkit.config import CfgNode, ConfigError, import_modules
from trainkit.engine import DefaultTrainer, user_errors_exit

_SUFFIXES = (".pt2", ".onnx", ".safetensors")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trainkit.projects.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "output", type=Path, metavar="FILE", help="to write: .pt2, .onnx or .safetensors"
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
    return parser.parse_intermixed_args(args)


def build_cfg(args: argparse.Namespace) -> CfgNode:
    """The config of the run, on a CPU.

    Raises:
        ConfigError: a mistake in the command.
    """
    path: Path = args.output
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f"the file {str(path)!r} has the suffix {path.suffix!r}; accepted: "
            f"{', '.join(_SUFFIXES)}"
        )
    check_writable(str(path))
    own = ["MODEL.DEVICE", "cpu", "DATALOADER.NUM_WORKERS", "0"]
    own += ["TEST.IMS_PER_BATCH", str(max(SIZES))]
    cfg = cfg_of_run(args.run, weights=args.weights, opts=[*args.opts, *own])
    import_modules(cfg.IMPORTS)
    return cfg


@torch.no_grad()
def main(args: argparse.Namespace) -> int:
    """The exit code."""
    cfg = build_cfg(args)
    trainer = find_trainer(cfg, args.script)
    model = DefaultPredictor(cfg, trainer.build_model).model
    if args.output.suffix == ".safetensors":
        return _export_weights(cfg, model, args.output)
    return _export_program(cfg, trainer, model, args)


def _export_program(
    cfg: CfgNode, trainer: type[DefaultTrainer], model: nn.Module, args: argparse.Namespace
) -> int:
    dataset = args.dataset or next(iter(cfg.DATASETS.TEST), "")
    if not dataset:
        raise ConfigError(
            "DATASETS.TEST is empty, so there are no examples; name a dataset with --dataset"
        )
    batches = example_batches(model, next(iter(trainer.build_test_loader(cfg, dataset))))
    program = export(model, batches[0], args.output)
    are_equal, table = compare(model, program, batches)
    _print_files(cfg, args.output)
    inputs = []
    for name, value in batches[0].items():
        shape = ", ".join(map(str, ["batch", *value.shape[1:]]))
        inputs.append(f"{name} [{shape}]")
    print(f"inputs   {', '.join(inputs)}\n\n{table}")
    if not are_equal:
        print(f"The outputs differ by more than {RTOL} of a value, or {ATOL}: do not use the file")
    return int(not are_equal)


def _export_weights(cfg: CfgNode, model: nn.Module, path: Path) -> int:
    weights = model.state_dict()
    # of the suffix, as for MODEL.WEIGHTS
    file_format = make_format("safetensors")
    try:
        file_format.write({"model": weights}, str(path))
    except TypeError as error:
        raise ConfigError(f"the weights cannot be exported: {error}") from error
    are_equal = _are_same(weights, file_format.read(str(path))["model"])
    _print_files(cfg, path)
    num_values = sum(weight.numel() for weight in weights.values())
    print(f"values   {num_values:,} in {len(weights)} tensors")
    print(f"equal    {'yes' if are_equal else 'NO'}")
    return int(not are_equal)


def _are_same(weights: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> bool:
    """Whether both have the same names, types, shapes and bytes."""
    if weights.keys() != found.keys():
        return False
    for name, weight in weights.items():
        other = found[name]
        if (weight.dtype, weight.shape) != (other.dtype, other.shape):
            return False
        # bytes, so that NaN equals NaN
        if not torch.equal(_bytes(weight), _bytes(other)):
            return False
    return True


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _print_files(cfg: CfgNode, path: Path) -> None:
    print(f"weights  {cfg.MODEL.WEIGHTS}")
    print(f"file     {path}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    with user_errors_exit():
        sys.exit(main(parse_args()))
