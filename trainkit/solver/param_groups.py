"""Sort the parameters of a model into groups with their hyper-parameters."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from trainkit.utils.errors import ConfigError
from trainkit.utils.periods import check_number

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
    *,
    all_biases: bool = False,
) -> list[dict[str, Any]]:
    """Put the trainable parameters of a model into few groups for an optimizer, as in detectron2.

    A shared parameter is listed once, under its first name. The same model and arguments give the
    same groups in the same order, so that a run can resume.

    Args:
        base_lr, weight_decay: None leaves the value to the optimizer.
        weight_decay_norm: weight decay of parameters of norm layers; None: ``weight_decay``.
        weight_decay_bias: weight decay of parameters named ``bias``, also those of norm layers;
            None: as the others.
        bias_lr_factor: multiplies the learning rate of every parameter named ``bias``.
        lr_factor_func: takes a parameter's full name, such as ``backbone.conv1.weight``, and gives
            a further factor.
        overrides: leaf name (``bias``) or full name of a parameter (which wins) ->
            hyper-parameters.
        all_biases: also treat other biases as those named ``bias``, see `is_bias`. Without it,
            biases that a rule misses are named in a warning.
    """
    if overrides is None:
        overrides = {}
    has_rule = bias_lr_factor != 1.0 or weight_decay_bias not in (None, weight_decay)
    if has_rule and not all_biases:
        warn_of_missed_biases(model)
    if base_lr is None and (bias_lr_factor != 1.0 or lr_factor_func is not None):
        raise ValueError("bias_lr_factor and lr_factor_func multiply base_lr, which is None")
    numbers = {
        "weight_decay": weight_decay,
        "weight_decay_norm": weight_decay_norm,
        "weight_decay_bias": weight_decay_bias,
        "bias_lr_factor": bias_lr_factor,
    }
    for argument, value in numbers.items():
        if value is not None:
            check_number(argument, value, "[0, inf)")  # torch does not check those of a group

    modules = dict(model.named_modules())
    groups = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        counts_as_bias = is_bias(name, all_biases)
        module_name, _, leaf_name = name.rpartition(".")
        decay = weight_decay
        if isinstance(modules.get(module_name), NORM_LAYERS) and weight_decay_norm is not None:
            decay = weight_decay_norm
        if counts_as_bias and weight_decay_bias is not None:
            decay = weight_decay_bias
        group: dict[str, Any] = {"params": [param]}
        if base_lr is not None:
            lr = base_lr * (bias_lr_factor if counts_as_bias else 1.0)
            if lr_factor_func is not None:
                lr = lr * lr_factor_func(name)
            group["lr"] = lr
        if decay is not None:
            group["weight_decay"] = decay
        group.update(overrides.get(leaf_name, {}))
        group.update(overrides.get(name, {}))
        groups.append(group)
    return reduce_param_groups(groups)


_PARAMETRIZED_BIAS = re.compile(r"parametrizations\.bias\.original\d*\Z")


def is_bias(name: str, all_biases: bool) -> bool:
    """Whether the parameter with this full name is a bias: it is called ``bias``, as in detectron2.

    With ``all_biases`` also one whose name starts or ends with this word, such as ``in_proj_bias``
    and ``bias_k`` of nn.MultiheadAttention and ``bias_ih_l0`` of nn.LSTM, and a bias that torch has
    parametrized. A table such as ``relative_position_bias_table`` is none.
    """
    leaf_name = name.rpartition(".")[2]
    if leaf_name == "bias":
        return True
    if not all_biases:
        return False
    words = leaf_name.split("_")
    return "bias" in (words[0], words[-1]) or bool(_PARAMETRIZED_BIAS.search(name))


def warn_of_missed_biases(model: nn.Module) -> None:
    """Warn about the trained biases that are not called ``bias``: rules for biases miss them."""
    missed = []
    for name, param in model.named_parameters():
        is_missed = is_bias(name, all_biases=True) and not is_bias(name, all_biases=False)
        if param.requires_grad and is_missed:
            missed.append(name)
    if missed:
        shown = ", ".join(missed[:5]) + (", ..." if len(missed) > 5 else "")
        _logger.warning(
            "The rules for biases apply only to parameters called bias, as in detectron2, and "
            "not to %d others: %s. SOLVER.ALL_BIASES True takes them in",
            len(missed),
            shown,
        )


def reduce_param_groups(params: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge groups with equal hyper-parameters: optimizers are faster with few large groups.

    The order of groups and parameters stays. If a parameter is listed twice, it stays at its first
    place and gets the later hyper-parameters.
    """
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in _expand_param_groups(params):
        [param] = group.pop("params")
        key = _as_key(group)
        if key not in merged:
            merged[key] = {"params": [], **group}
        merged[key]["params"].append(param)
    return list(merged.values())


def _as_key(hyper_parameters: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for equal hyper-parameters, in any order."""
    items = []
    for name in sorted(hyper_parameters):
        value = hyper_parameters[name]
        items.append((name, tuple(value) if isinstance(value, list) else value))
    return tuple(items)


def _expand_param_groups(params: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One group for each parameter."""
    group_of: dict[Any, dict[str, Any]] = {}
    for group in params:
        members = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        for param in members:
            if param not in group_of:
                group_of[param] = {}
            group_of[param].update({**group, "params": [param]})
    return list(group_of.values())


def start_momentum(optimizer: Optimizer) -> None:
    """Give all parameters of fused SGD a momentum of 0.

    Then the first update of any of them may come late or be skipped; without it torch fails, or has
    an uninitialised momentum. With dampening 0 the first update from zeros equals the usual one:
    ``momentum * 0 + grad``. Raises ConfigError if there is dampening.
    """
    for group in optimizer.param_groups:
        if group.get("fused") and group.get("momentum"):
            if group.get("dampening"):
                raise ConfigError(
                    "fused SGD with dampening has no right first update; set fused=False "
                    "(SOLVER.OPTIMIZER.FUSED)"
                )
            for param in group["params"]:
                optimizer.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
