"""Which hyper-parameters each parameter of a model gets."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

_logger = logging.getLogger(__name__)

_NORM_LAYERS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


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
    """Sort the trainable parameters of a model into as few groups for an optimizer as possible.

    A parameter's learning rate is the product of ``base_lr``, ``bias_lr_factor`` if it is called ``bias``, and
    ``lr_factor_func``. Its weight decay is ``weight_decay_bias`` if it is called ``bias``, else ``weight_decay_norm``
    if it belongs to a norm layer of ``torch.nn`` or a subclass of one, else ``weight_decay``; None passes on to the
    next. Frozen parameters are left out, shared ones come once, under their first name. The same model and arguments
    give the same groups in the same order, which a resumed run relies on.

    Args:
        base_lr: None leaves the learning rate to the optimizer.
        weight_decay: None leaves it to the optimizer.
        lr_factor_func: takes a parameter's full name, such as ``backbone.conv1.weight``.
        overrides: leaf name (``bias``) or full name of parameters -> hyper-parameters that replace all of the
            above; a full name wins over a leaf name. One that matches no parameter draws a warning.

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

    def hyperparams(module: nn.Module, leaf_name: str, full_name: str) -> dict[str, Any]:
        is_bias = leaf_name == "bias"
        lr = base_lr
        if lr is not None:
            lr *= bias_lr_factor if is_bias else 1.0
            lr *= lr_factor_func(full_name) if lr_factor_func is not None else 1.0
        decay = weight_decay
        if isinstance(module, _NORM_LAYERS) and weight_decay_norm is not None:
            decay = weight_decay_norm
        if is_bias and weight_decay_bias is not None:
            decay = weight_decay_bias
        values = {"lr": lr, "weight_decay": decay}
        return {
            **{key: value for key, value in values.items() if value is not None},
            **overrides.get(leaf_name, {}),
            **overrides.get(full_name, {}),
        }

    groups = []
    seen: set[nn.Parameter] = set()
    unmatched = set(overrides)
    for module_name, module in model.named_modules():
        for leaf_name, param in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{leaf_name}" if module_name else leaf_name
            unmatched -= {leaf_name, full_name}
            if param.requires_grad and param not in seen:
                seen.add(param)
                groups.append({"params": [param], **hyperparams(module, leaf_name, full_name)})
    if unmatched:
        _logger.warning("No parameter is called %s; these overrides have no effect.", ", ".join(sorted(unmatched)))
    return reduce_param_groups(groups)


def reduce_param_groups(params: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge parameter groups of equal hyper-parameters: optimizers work through few large groups faster.

    Groups keep the order of their first appearance, parameters their order within a group. A parameter that is
    listed again takes over the later hyper-parameters and keeps its place.
    """
    per_param: dict[Any, dict[str, Any]] = {}
    for group in params:
        hyperparams = {key: value for key, value in group.items() if key != "params"}
        members = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        for param in members:
            per_param.setdefault(param, {}).update(hyperparams)

    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for param, hyperparams in per_param.items():
        key = tuple(sorted((name, _hashable(value)) for name, value in hyperparams.items()))
        merged.setdefault(key, {"params": [], **hyperparams})["params"].append(param)
    return list(merged.values())


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
