"""The memory of a training step, estimated without allocating it."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from trainkit.config import CfgNode, ConfigError
from trainkit.engine import DefaultTrainer
from trainkit.engine.losses import parse_losses

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

    The steps run on fake tensors in the memory of the CPU, with the share of SOLVER.IMS_PER_BATCH of one of ``ranks``
    ranks. DDP's copy of the gradients is counted, and under MODEL.PARALLEL fsdp parameters, gradients and optimizer
    are divided; the parameters of a block that are gathered for its computation are not counted. Frozen parameters
    count as buffers.

    Args:
        sample: a batch of one sample.

    Raises:
        ConfigError: the model reads values of tensors, which fake ones do not have.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE, amp = "meta", cfg.SOLVER.AMP
    with torch.device("meta"):
        model = trainer.build_model(cfg).train()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        _put_on_cpu(model)
        try:
            optimizer = trainer.build_optimizer(cfg, model)
            batch = _batch_of(sample, max(cfg.SOLVER.IMS_PER_BATCH // ranks, 1), fake)
            tracker = MemTracker()
            tracker.track_external(model, optimizer, *_tensors(batch))
            with tracker:
                for step in range(2):
                    optimizer.zero_grad()
                    dtype = getattr(torch, amp.PRECISION)
                    with torch.autocast("cpu", dtype=dtype) if amp.ENABLED else nullcontext():
                        loss = parse_losses(model(batch)).total
                    loss.backward()
                    optimizer.step()
                    if step == 0:  # the optimizer has its state from here on
                        tracker.reset_mod_stats()
        except Exception as error:  # a model may raise anything
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ConfigError(
                f"--memory: a step on tensors without values failed: {reason}"
            ) from error
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    found = {name: peak.get(kind, 0) for kind, name in _named(peak).items()}
    found["other"] = peak["Total"] - sum(found.values())
    if ranks > 1 and cfg.MODEL.PARALLEL == "fsdp":
        found |= {name: -(-found[name] // ranks) for name in _DIVIDED}
    elif ranks > 1 and not cfg.MODEL.DDP.GRADIENT_AS_BUCKET_VIEW:
        found["copy of the gradients (DDP)"] = sum(
            p.nbytes for p in model.parameters() if p.requires_grad
        )
    return {**found, "total": sum(found.values())}


def report_memory(found: Mapping[str, int], ranks: int) -> str:
    """A table of `estimate_memory`."""
    rows = [(name, f"{size / 2**20:,.1f}") for name, size in found.items()]
    of = "of a rank" if ranks > 1 else "of the run"
    return tabulate(
        rows,
        ["at the peak of a step", f"MiB {of}"],
        disable_numparse=True,
        colalign=["left", "right"],
    )


def _put_on_cpu(model: nn.Module) -> None:
    """Like ``model.to("cpu")``, which fake tensors do not support; frozen parameters become buffers for the tracker."""
    same: dict[Tensor, Tensor] = {}  # modules may share tensors
    for module in model.modules():
        for name, tensor in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            if tensor not in same:
                empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
                same[tensor] = nn.Parameter(empty) if tensor.requires_grad else empty
            delattr(module, name)
            if tensor.requires_grad:
                setattr(module, name, same[tensor])
            else:
                module.register_buffer(name, same[tensor])


def _named(peak: Mapping[Any, int]) -> dict[Any, str]:
    return {kind: _KINDS[kind.name] for kind in peak if getattr(kind, "name", "") in _KINDS}


def _batch_of(value: Any, size: int, fake: FakeTensorMode) -> Any:
    """A batch of ``size`` samples like that of one sample, of fake tensors."""
    if isinstance(value, Tensor):
        return fake.from_tensor(value).new_empty((size, *value.shape[1:]))
    if isinstance(value, Mapping):
        return {name: _batch_of(item, size, fake) for name, item in value.items()}
    if isinstance(value, list) and len(value) == 1:  # one sample, or one name
        return [fake.from_tensor(value[0]) if isinstance(value[0], Tensor) else value[0]] * size
    return (
        type(value)(_batch_of(item, size, fake) for item in value)
        if isinstance(value, list | tuple)
        else value
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return [tensor for item in values for tensor in _tensors(item)]
