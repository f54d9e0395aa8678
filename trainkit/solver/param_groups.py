"""Sort the parameters of a model into groups with their hyper-parameters."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from trainkit.utils.tables import format_table

_logger = logging.getLogger(__name__)

# _NormBase: all batch and instance norms
NORM_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm, nn.RMSNorm)


def get_default_optimizer_params(
    model: nn.Module,
    base_lr: float | None = None,
    weight_decay: float | None = None,
    weight_decay_norm: float | None = None,
    bias_lr_factor: float = 1.0,
    weight_decay_bias: float | None = None,
    lr_factor_func: Callable[[str], float] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Put the trainable parameters of a model into as few groups for an optimizer as possible, as in detectron2.

    Frozen parameters are left out; a shared parameter is listed once, under its first name. The same model and
    arguments give the same groups in the same order, so that a run can resume.

    Args:
        base_lr, weight_decay: None leaves the value to the optimizer.
        weight_decay_norm, weight_decay_bias: weight decay of parameters of norm layers, and of those named ``bias``
            (this one wins); None: ``weight_decay``.
        bias_lr_factor: multiplies the learning rate of every parameter named ``bias``.
        lr_factor_func: takes a parameter's full name, such as ``backbone.conv1.weight``, and gives a further factor.
        overrides: leaf name (``bias``) or full name of a parameter -> hyper-parameters that replace all others; a full
            name wins over a leaf name. If a name matches no parameter, a warning is logged.

    Raises:
        ValueError: a factor is given without ``base_lr``, or a hyper-parameter of biases is given twice.
    """
    overrides = overrides or {}
    if base_lr is None and (bias_lr_factor != 1.0 or lr_factor_func is not None):
        raise ValueError("bias_lr_factor and lr_factor_func multiply base_lr, which is None; give base_lr as well")
    bias_overrides = overrides.get("bias", {})
    if bias_lr_factor != 1.0 and "lr" in bias_overrides:
        raise ValueError("bias_lr_factor and overrides['bias']['lr'] both set the lr of biases; give one of them")
    if weight_decay_bias is not None and "weight_decay" in bias_overrides:
        raise ValueError("weight_decay_bias and overrides['bias']['weight_decay'] are the same; give one of them")

    modules = dict(model.named_modules())
    leaf_names = {name: name.rpartition(".")[2] for name, _ in model.named_parameters()}
    if unmatched := {*overrides} - {*leaf_names, *leaf_names.values()}:
        _logger.warning("No parameter is called %s; these overrides have no effect", ", ".join(sorted(unmatched)))
    groups = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        lr, decay, leaf_name = base_lr, weight_decay, leaf_names[name]
        # None: the model renames its parameters
        if isinstance(modules.get(name.rpartition(".")[0]), NORM_LAYERS) and weight_decay_norm is not None:
            decay = weight_decay_norm
        if leaf_name == "bias" and weight_decay_bias is not None:
            decay = weight_decay_bias
        if lr is not None:
            lr = lr * (bias_lr_factor if leaf_name == "bias" else 1.0)
            lr = lr if lr_factor_func is None else lr * lr_factor_func(name)
        own = {key: value for key, value in (("lr", lr), ("weight_decay", decay)) if value is not None}
        groups.append({"params": [param], **own, **overrides.get(leaf_name, {}), **overrides.get(name, {})})
    return reduce_param_groups(groups)


def reduce_param_groups(params: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge parameter groups with equal hyper-parameters: optimizers are faster with few large groups.

    The order of groups and parameters stays. If a parameter is listed twice, it stays at its first place and gets the
    later hyper-parameters.
    """
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in _expand_param_groups(params):
        [param] = group.pop("params")
        key = tuple(sorted((name, tuple(value) if isinstance(value, list) else value) for name, value in group.items()))
        merged.setdefault(key, {"params": [], **group})["params"].append(param)
    return list(merged.values())


def _expand_param_groups(params: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    per_param: dict[Any, dict[str, Any]] = {}
    for group in params:
        members = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        for param in members:
            per_param.setdefault(param, {}).update({**group, "params": [param]})
    return list(per_param.values())


def describe_param_groups(groups: Optimizer | Iterable[Mapping[str, Any]], model: nn.Module) -> str:
    """A table of an optimizer's groups: rates, sizes, a name, and the further options in which groups differ.

    If a learning rate is a tensor, this waits for its device.
    """
    groups = list(groups.param_groups if isinstance(groups, Optimizer) else groups)
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    options = dict.fromkeys(option for group in groups for option in group)
    shown = ("params", "lr", "weight_decay", "initial_lr")
    differing = [o for o in options if o not in shown and any(group.get(o) != groups[0].get(o) for group in groups)]
    rows = []
    for index, group in enumerate(groups):
        members = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        rates = [f"{float(group[key]):g}" if key in group else "" for key in ("lr", "weight_decay")]
        others = ", ".join(f"{option}={group[option]}" for option in differing if option in group)
        examples = [names.get(param, "(not of this model)") for param in members[:1]] + ["..."] * (len(members) > 1)
        size = f"{sum(param.numel() for param in members):,}"
        rows.append([index, *rates, *[others] * bool(differing), len(members), size, ", ".join(examples)])
    headers = ["group", "lr", "decay", *["options"] * bool(differing), "parameters", "values", "names"]
    return format_table(rows, headers, tablefmt="pipe", disable_numparse=True)
