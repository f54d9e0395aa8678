#!/usr/bin/env python
"""Count parameters, FLOPs and activations of a config's model, module by module.

::

    python tools/analyze_model.py --config-file projects/digits/config.yaml
    python tools/analyze_model.py --config-file cfg.yaml --depth 2 --input-shape image=3,224,224 MODEL.WIDTH 32
    python tools/analyze_model.py --config-file output/mine/config.yaml --script train.py
    python tools/analyze_model.py --config-file cfg.yaml --memory 8 MODEL.PARALLEL fsdp

The tool counts them in eval mode for one sample: the first one of the test data, or zeros of --input-shape. FLOPs are
the multiply-adds of convolutions, matrix products and attention; activations are their output values. Averaged weights
are not part of the model and are not counted. --memory estimates the memory of a training step instead, of one of so
many ranks, with tensors that take none. The tool writes no files. --script names the file of a job in which a
subclass of DefaultTrainer builds the model or the test loader.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from model_memory import estimate_memory, report_memory
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from user_job import SCRIPT_HELP, find_trainer, positive

from trainkit.config import CfgNode, ConfigError, get_cfg
from trainkit.engine import DefaultTrainer, user_errors_exit
from trainkit.utils.device import device_of, move_to_device

ROOT = Path(__file__).resolve().parents[1]
DEPTH = 3


# ---------------------------------------------------------------------------- one sample


def sample_batch(cfg: CfgNode, trainer: type[DefaultTrainer] = DefaultTrainer) -> Any:
    """A batch with the first sample of DATASETS.TEST, or else of DATASETS.VAL, from the test loader of ``trainer``.

    Raises:
        ConfigError: the config names no dataset, or a dataset that does not exist.
    """
    names = [*cfg.DATASETS.TEST, *cfg.DATASETS.VAL]
    if not names:
        raise ConfigError(
            "DATASETS.TEST names no dataset to take a sample from; give the --input-shape"
        )
    cfg = cfg.clone()
    cfg.defrost()
    cfg.TEST.IMS_PER_BATCH, cfg.DATALOADER.NUM_WORKERS = 1, 0
    return next(iter(trainer.build_test_loader(cfg, names[0])))


def batch_of_shapes(cfg: CfgNode, shapes: Iterable[tuple[str, list[int]]]) -> Any:
    """Zeros for one sample, collated by DATALOADER.COLLATE; the name "" means that the sample is a tensor.

    Raises:
        ConfigError: there is "" together with other names, or a name is given twice.
    """
    sample: dict[str, Tensor] = {}
    for name, shape in shapes:
        if name in sample:
            raise ConfigError(
                f"--input-shape: the name {name!r} is given twice; give each name one shape"
            )
        sample[name] = torch.zeros(shape)
    bare = sample.get("")
    if bare is not None and len(sample) > 1:
        raise ConfigError(
            "--input-shape: a sample is one tensor or has names for all, got both; give all a name"
        )
    if cfg.DATALOADER.COLLATE == "list":
        return [sample if bare is None else bare]
    return {name: value[None] for name, value in sample.items()} if bare is None else bare[None]


# ---------------------------------------------------------------------------- counting


class Counts:
    """FLOPs and activations of one forward pass of a model.

    The counts of a module include those of all modules in it, no matter which module calls them.

    Attributes:
        flops, activations: module name -> number; "" is the model. Modules with 0 are left out.
        uncounted: class -> number of its modules that were called but not counted; modules with submodules are left
            out.
        not_called: names of modules that were not called, if none of their submodules was called either.

    Raises:
        ConfigError: the model does not accept the batch.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        model.eval()
        device = device_of(model)
        own = _count(model, batch if device is None else move_to_device(batch, device))
        called, names = [*own[0]], [name for name, _ in model.named_modules()]
        self.flops, self.activations = (
            {
                name: number
                for name in names
                if (number := sum(n for inner, n in counts.items() if _is_in(inner, name)))
            }
            for counts in own
        )
        self.not_called = sorted(
            name for name in names if not any(_is_in(inner, name) for inner in called)
        )
        self.uncounted = Counter(
            type(module).__name__
            for name, module in model.named_modules()
            if name in called and name not in self.flops and not any(module.children())
        )


def _count(model: nn.Module, batch: Any) -> tuple[Counter[str], Counter[str]]:
    """FLOPs and activations of each module that is called, without those of the modules that it calls.

    Raises:
        ConfigError: the model does not accept the batch.
    """
    flops = FlopCounterMode(display=False)
    activations = FlopCounterMode(
        display=False, custom_mapping=dict.fromkeys(flops.flop_registry, _num_values)
    )
    own: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    running: list[str] = []  # the innermost module is the last one

    def settle() -> None:
        """Give everything that was counted since the last call to the innermost module."""
        # torch counts a multiply-add as two
        totals = (
            flops.get_total_flops() // 2,
            activations.get_total_flops(),
        )
        for counts, total in zip(own, totals, strict=True):
            counts[running[-1]] += total - counts.total()

    def enter(name: str) -> None:
        if running:
            settle()
        running.append(name)

    def leave() -> None:
        settle()
        running.pop()

    hooks = [
        hook
        for name, module in model.named_modules()
        for hook in (
            module.register_forward_pre_hook(lambda module, inputs, name=name: enter(name)),
            module.register_forward_hook(lambda module, inputs, output: leave()),
        )
    ]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # otherwise an encoder layer is one operator, which is not counted
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        # attention as two matrix products: not all versions of torch count its other kernels
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), flops, activations:
            model(batch)
    except Exception as error:  # a model may raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(
            f"the model does not take the input {_describe(batch)}: {reason}"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for hook in hooks:
            hook.remove()
    return own


def _num_values(*args: Any, out_shape: Any, **kwargs: Any) -> int:
    """The number of values of an operator's first output; attention also returns values for its backward pass."""
    return (out_shape if isinstance(out_shape, torch.Size) else out_shape[0]).numel()


def _is_in(inner: str, name: str) -> bool:
    return not name or inner == name or inner.startswith(f"{name}.")


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [*value.shape]
    if isinstance(value, Mapping):
        return {name: _describe(item) for name, item in value.items()}
    return [_describe(item) for item in value] if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------------------- the report


def report(model: nn.Module, batch: Any, depth: int = DEPTH) -> str:
    """The table, and lines that name the modules that it does not count.

    Raises:
        ConfigError: as `Counts`.
    """
    counts = Counts(model, batch)
    rows = []
    for name, module in model.named_modules():
        if name.count(".") + bool(name) > depth:
            continue
        trainable = (parameter for parameter in module.parameters() if parameter.requires_grad)
        sizes = [
            sum(map(Tensor.numel, tensors))
            for tensors in (module.parameters(), trainable, module.buffers())
        ]
        counted = [_number(found.get(name, 0)) for found in (counts.flops, counts.activations)]
        if name in counts.not_called:
            counted = ["-", "-"]
        rows.append([name or "(model)", type(module).__name__, *map(_number, sizes), *counted])
    headers = ["module", "class", "parameters", "trainable", "buffers", "FLOPs", "activations"]
    lines = [tabulate(rows, headers, disable_numparse=True, colalign=["left"] * 2 + ["right"] * 5)]
    lines.append(f"For the input {_describe(batch)}, in eval mode.")
    if counts.uncounted:
        found = ", ".join(f"{number} {name}" for name, number in counts.uncounted.most_common())
        lines.append(f"Nothing is counted in {found}.")
    if counts.not_called:
        lines.append(f"Not called, or not as modules: {', '.join(counts.not_called)}.")
    return "\n".join(lines)


def _number(number: int) -> str:
    return f"{number:,}" if number else ""


# ---------------------------------------------------------------------------- the command line


def main(args: argparse.Namespace) -> None:
    """Print the report."""
    with user_errors_exit():
        cfg = get_cfg()
        cfg.merge_from_file(args.config_file)
        cfg.merge_from_list(args.opts)
        if cfg.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available():
            cfg.MODEL.DEVICE = "cpu"  # the counts are the same
        cfg.freeze()
        trainer = find_trainer(cfg, args.script)
        batch = (
            batch_of_shapes(cfg, args.input_shape)
            if args.input_shape
            else sample_batch(cfg, trainer)
        )
        if args.memory:
            print(report_memory(estimate_memory(cfg, trainer, batch, args.memory), args.memory))
        else:
            print(report(trainer.build_model(cfg), batch, args.depth))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s --config-file FILE [options] [KEY VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config-file",
        required=True,
        metavar="FILE",
        help="a config; also the config.yaml of a run",
    )
    parser.add_argument("--script", default="", metavar="FILE", help=SCRIPT_HELP)
    parser.add_argument(
        "--depth", type=int, default=DEPTH, metavar="N", help=f"levels of modules shown ({DEPTH})"
    )
    text = "the memory of a training step, of one of so many ranks, in place of the counts"
    parser.add_argument("--memory", type=positive, default=0, metavar="RANKS", help=text)
    parser.add_argument(
        "--input-shape",
        action="append",
        type=_named_shape,
        metavar="[NAME=]N,N,...",
        help="the shape of one input of the model, float32, instead of the test data; give it once for each name",
    )
    parser.add_argument(
        "opts", nargs="*", metavar="KEY VALUE", help="changes to the config, such as MODEL.WIDTH 32"
    )
    return parser.parse_intermixed_args(arguments)


def _named_shape(text: str) -> tuple[str, list[int]]:
    name, _, shape = text.rpartition("=")
    sizes = shape.split(",")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"need such as 3,224,224 or image=3,224,224, got {text!r}")
    return name, [int(size) for size in sizes]


if __name__ == "__main__":
    # so that IMPORTS can name projects, and modules in the current folder
    sys.path += [
        str(ROOT),
        str(Path.cwd()),
    ]
    main(parse_args())
