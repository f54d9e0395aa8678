#!/usr/bin/env python
"""Count parameters, FLOPs and activations of a config's model, or estimate its memory.

::

    python tools/analyze_model.py --config-file projects/digits/config.yaml
    python tools/analyze_model.py --config-file job.yaml --depth 2 --input-shape image=3,224,224
    python tools/analyze_model.py --config-file output/mine/config.yaml --script train.py
    python tools/analyze_model.py --config-file job.yaml --memory 8 MODEL.PARALLEL fsdp

The counts are fvcore's, of a forward pass in eval mode for one sample: the first one of the test
data, or zeros of --input-shape. A multiply-add is one FLOP; activations are the output values of
convolutions and products. Averaged weights are not part of the model and are not counted.

--memory estimates the memory of a training step instead, of one of so many ranks, by torch's
MemTracker on tensors without values. The tool writes no files. --script names the file of a job in
which a subclass of DefaultTrainer builds the model or the test loader.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from fvcore.nn import (
    ActivationCountAnalysis,
    FlopCountAnalysis,
    flop_count_table,
    parameter_count,
)
from fvcore.nn.jit_handles import get_shape
from tabulate import tabulate
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from trainkit.projects.finders.command import positive
from trainkit.projects.finders.script import SCRIPT_HELP, find_trainer

from trainkit.config import CfgNode, ConfigError, get_cfg
from trainkit.engine import DefaultTrainer, user_errors_exit
from trainkit.engine.losses import parse_losses
from trainkit.utils.device import device_of, move_to_device

ROOT = Path(__file__).resolve().parents[1]
DEPTH = 3


# ---------------------------------------------------------------------------- one sample


def sample_batch(cfg: CfgNode, trainer: type[DefaultTrainer] = DefaultTrainer) -> Any:
    """A batch with the first sample of DATASETS.TEST, or else of DATASETS.VAL.

    It comes from the test loader of ``trainer``.

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
    cfg.TEST.IMS_PER_BATCH = 1
    cfg.DATALOADER.NUM_WORKERS = 0
    return next(iter(trainer.build_test_loader(cfg, names[0])))


def batch_of_shapes(cfg: CfgNode, shapes: Iterable[tuple[str, list[int]]]) -> Any:
    """Zeros for one sample, collated by DATALOADER.COLLATE.

    Args:
        shapes: (name, shape) of each input; the name "" means that the sample is a tensor.

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
    if "" in sample and len(sample) > 1:
        raise ConfigError(
            "--input-shape: a sample is one tensor or has names for all, got both; give all a name"
        )
    if cfg.DATALOADER.COLLATE == "list":
        return [sample.get("", sample)]
    batch = {name: value[None] for name, value in sample.items()}
    return batch.get("", batch)


# ---------------------------------------------------------------------------- the counts


def report(model: nn.Module, batch: Any, depth: int = DEPTH) -> str:
    """fvcore's table, and lines that say what it does not count.

    Raises:
        ConfigError: the model does not accept the batch.
    """
    flops, activations = count(model, batch)
    rows = flop_count_table(flops, depth, activations, show_param_shapes=False)
    parameters = parameter_count(model)[""]
    trainable = sum(x.numel() for x in model.parameters() if x.requires_grad)
    lines = [
        rows,
        f"Input: {_describe(batch)}, in eval mode.",
        f"In all: {parameters:,} parameters, {trainable:,} of them trainable; {flops.total():,} "
        f"FLOPs; {activations.total():,} activations.",
    ]
    not_counted = flops.unsupported_ops()
    if not_counted:
        operators = [f"{number} {name}" for name, number in not_counted.most_common()]
        lines.append(f"No FLOPs are counted for: {', '.join(operators)}.")
    not_called = []
    for name in sorted(flops.uncalled_modules()):
        # it has no operator by which fvcore could see it
        if not isinstance(model.get_submodule(name), nn.Identity):
            not_called.append(name)
    if not_called:
        lines.append(f"Not called, or not as modules: {', '.join(not_called)}.")
    return "\n".join(lines)


def count(model: nn.Module, batch: Any) -> tuple[FlopCountAnalysis, ActivationCountAnalysis]:
    """FLOPs and activations of one forward pass in eval mode.

    Raises:
        ConfigError: the model does not accept the batch.
    """
    model.eval()
    device = device_of(model)
    if device is not None:
        batch = move_to_device(batch, device)
    leaves, spec = tree_flatten(batch)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    results: list[Tensor] = []

    # fvcore traces: the input has to be a tuple of tensors, and what leads to no output is dropped
    def into_batch(module: nn.Module, given: tuple[Tensor, ...]) -> Any:
        remaining = iter(given)
        values = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return (tree_unflatten(values, spec),)

    def keep_result(module: nn.Module, inputs: Any, output: Any) -> None:
        results.extend(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))

    def all_results(module: nn.Module, inputs: Any, output: Any) -> tuple[Tensor, ...]:
        found = tuple(results)
        results.clear()
        return found

    handles = [module.register_forward_hook(keep_result) for module in model.modules()]
    handles.append(model.register_forward_pre_hook(into_batch))
    handles.append(model.register_forward_hook(all_results))
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # otherwise an encoder layer is one operator, which is not counted
    torch.backends.mha.set_fastpath_enabled(False)
    flops = FlopCountAnalysis(model, tensors)
    flops.set_op_handle("aten::scaled_dot_product_attention", _attention_flops)
    activations = ActivationCountAnalysis(model, tensors)
    activations.set_op_handle("aten::scaled_dot_product_attention", _attention_activations)
    try:
        with torch.no_grad():
            for analysis in (flops, activations):
                analysis.unsupported_ops_warnings(False)
                analysis.uncalled_modules_warnings(False)
                analysis.total()
    except Exception as error:  # a model may raise anything
        raise ConfigError(
            f"the model does not take the input {_describe(batch)}: {_first_line(error)}"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for handle in handles:
            handle.remove()
    return flops, activations


def _attention_flops(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Of the two products: queries with keys, and scores with values."""
    *batch, length, size = get_shape(inputs[0])
    num_keys = get_shape(inputs[1])[-2]
    size_of_values = get_shape(inputs[2])[-1]
    return math.prod(batch) * length * num_keys * (size + size_of_values)


def _attention_activations(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """The results of the two products."""
    *batch, length, _ = get_shape(inputs[0])
    num_keys = get_shape(inputs[1])[-2]
    size_of_values = get_shape(inputs[2])[-1]
    return math.prod(batch) * length * (num_keys + size_of_values)


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [*value.shape]
    if isinstance(value, Mapping):
        return {name: _describe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_describe(item) for item in value]
    return value


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


# ---------------------------------------------------------------------------- the memory of a step


# how torch's tracker calls them, and how the report does
_KINDS = {
    "PARAM": "parameters",
    "BUFFER": "buffers",
    "GRAD": "gradients",
    "OPT": "optimizer",
    "ACT": "activations",
}
_DIVIDED = ("parameters", "gradients", "optimizer")  # among the ranks of MODEL.PARALLEL fsdp


def estimate_memory(
    cfg: CfgNode, trainer: type[DefaultTrainer], sample: Any, ranks: int = 1
) -> dict[str, int]:
    """Bytes of a rank at the peak of its second step: of each kind of tensor, and the total.

    The steps run on fake tensors in the memory of the CPU, with the share of SOLVER.IMS_PER_BATCH
    of one of ``ranks`` ranks. DDP's copy of the gradients is counted, and under MODEL.PARALLEL fsdp
    parameters, gradients and optimizer are divided; the parameters of a block that are gathered for
    its computation are not counted. Frozen parameters count as buffers.

    Args:
        sample: a batch of one sample.

    Raises:
        ConfigError: the model reads values of tensors, which fake ones do not have.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        model = trainer.build_model(cfg).train()
    batch_size = max(cfg.SOLVER.IMS_PER_BATCH // ranks, 1)
    tracker = MemTracker()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        _put_on_cpu(model)
        try:
            optimizer = trainer.build_optimizer(cfg, model)
            batch = _batch_of(sample, batch_size, fake)
            tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
            tracker.track_external(model, optimizer, *tensors)
            with tracker:
                _make_step(cfg, model, optimizer, batch)
                tracker.reset_mod_stats()  # the optimizer has its state from here on
                _make_step(cfg, model, optimizer, batch)
        except Exception as error:  # a model may raise anything
            raise ConfigError(
                f"--memory: a step on tensors without values failed: {_first_line(error)}"
            ) from error
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    found = {}
    for kind, size in peak.items():
        name = _KINDS.get(getattr(kind, "name", ""))
        if name is not None:
            found[name] = size
    found["other"] = peak["Total"] - sum(found.values())
    if ranks > 1 and cfg.MODEL.PARALLEL == "fsdp":
        for name in _DIVIDED:
            found[name] = math.ceil(found[name] / ranks)
    elif ranks > 1 and not cfg.MODEL.DDP.GRADIENT_AS_BUCKET_VIEW:
        trained = [x for x in model.parameters() if x.requires_grad]
        found["copy of the gradients (DDP)"] = sum(x.nbytes for x in trained)
    found["total"] = sum(found.values())
    return found


def _make_step(
    cfg: CfgNode, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
) -> None:
    optimizer.zero_grad()
    autocast: Any = nullcontext()
    if cfg.SOLVER.AMP.ENABLED:
        autocast = torch.autocast("cpu", dtype=getattr(torch, cfg.SOLVER.AMP.PRECISION))
    with autocast:
        loss = parse_losses(model(batch)).total
    loss.backward()
    optimizer.step()


def report_memory(found: Mapping[str, int], ranks: int) -> str:
    """A table of `estimate_memory`."""
    rows = [(name, f"{size / 2**20:,.1f}") for name, size in found.items()]
    of = "of a rank" if ranks > 1 else "of the run"
    headers = ["at the peak of a step", f"MiB {of}"]
    return tabulate(rows, headers, disable_numparse=True, colalign=["left", "right"])


def _put_on_cpu(model: nn.Module) -> None:
    """Like ``model.to("cpu")``, which fake tensors do not support.

    Frozen parameters become buffers, because the tracker expects a gradient of each parameter.
    """
    same: dict[Tensor, Tensor] = {}  # modules may share tensors
    for module in model.modules():
        parameters = list(module.named_parameters(recurse=False))
        buffers = list(module.named_buffers(recurse=False))
        for name, tensor in [*parameters, *buffers]:
            if tensor not in same:
                empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
                same[tensor] = nn.Parameter(empty) if tensor.requires_grad else empty
            delattr(module, name)
            if tensor.requires_grad:
                setattr(module, name, same[tensor])
            else:
                module.register_buffer(name, same[tensor])


def _batch_of(value: Any, size: int, fake: FakeTensorMode) -> Any:
    """A batch of ``size`` samples like that of one sample, of fake tensors."""
    if isinstance(value, Tensor):
        return fake.from_tensor(value).new_empty((size, *value.shape[1:]))
    if isinstance(value, Mapping):
        return {name: _batch_of(item, size, fake) for name, item in value.items()}
    if isinstance(value, list) and len(value) == 1:  # one sample, or one name
        (item,) = value
        if isinstance(item, Tensor):
            item = fake.from_tensor(item)
        return [item] * size
    if isinstance(value, list | tuple):
        return type(value)(_batch_of(item, size, fake) for item in value)
    return value


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
