"""Learning rates that fall from the last layer of a model to the first."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainkit.utils.registry import Registry

_logger = logging.getLogger(__name__)

LAYER_DEPTH_REGISTRY = Registry("LAYER_DEPTH")
"""Functions from a parameter's full name to ``(depth, num_layers)``: depth 0 is first, ``num_layers - 1`` last."""


def build_layer_decay(
    model: nn.Module,
    rate: float,
    scheme: str,
    num_layers: int | None = None,
    depths: Sequence[int] | None = None,
    prefix: str | None = None,
) -> Callable[[str], float]:
    """A function from a parameter's full name to the factor ``rate ** (num_layers - 1 - depth)``.

    Pass it as ``lr_factor_func`` to ``ParamRules`` or ``get_default_optimizer_params``. It changes learning rates only;
    other rules choose the weight decay (OpenMMLab's constructors do both).

    ``scheme`` is a name in the table of `projects/solver_extras/README.md`, which says what it takes and which depths
    it gives; or "model", for those of ``model.get_layer_depth(name)``; or a name in ``LAYER_DEPTH_REGISTRY``.

    Names of OpenMMLab, timm (``blocks.3.``, ``stages.2.blocks.0.``, ``stem.``) and Hugging Face (``embeddings.``,
    ``encoder.layer.3.``, ``encoder.stages.2.layers.0.``) are recognized.

    ``rate`` is in (0, 1]; ``num_layers`` the number of blocks (``vit``) or layers (``convnext``); ``depths`` the number
    of blocks of each stage. Names of the backbone's parameters start with ``prefix``; all others are the rest. None:
    ``backbone.`` or the ``base_model_prefix`` of a Hugging Face model, if there are such parameters, else nothing.
    The log names the rest. A shared parameter has the smallest depth of its names.

    Raises ValueError: the scheme is unknown or does not fit the model's names; a parameter of the backbone that is
    defined before the first block would be the rest; an argument is missing or wrong.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"rate must be in (0, 1], got {rate}")
    names_of = names_of_parameters(model)
    names: list[str] = []
    for of_parameter in names_of.values():
        names += of_parameter
    if scheme in _SCHEMES:
        if prefix is None:
            prefix = _usual_prefix(model, names)
        needed = _SCHEMES[scheme].needs
        arguments: dict[str, Any] = {"": 4, "num_layers": num_layers, "depths": depths}
        argument = arguments[needed]
        if not argument:
            raise ValueError(
                f"scheme {scheme!r} needs {needed} ({needed.upper()}); see build_layer_decay"
            )
        found = _named_depths(argument, scheme, names, prefix, names_of.values())
    else:
        depth_of = _depth_function(model, scheme)
        found = {name: depth_of(name) for name in names}
    for name, (depth, count) in found.items():
        if not 0 <= depth < count and scheme not in _SCHEMES:
            raise ValueError(
                f"scheme {scheme!r}: the depth of {name} must be in [0, {count}), got {depth}"
            )
    factors: dict[str, float] = {}
    for shared_names in names_of.values():
        depth, count = min(found[name] for name in shared_names)
        factors |= dict.fromkeys(shared_names, rate ** (count - 1 - depth))
    return factors.__getitem__


def _usual_prefix(model: nn.Module, names: Sequence[str]) -> str:
    """The start of the names of the backbone; "" if none is usual."""
    of_hugging_face = getattr(model, "base_model_prefix", "backbone")
    for prefix in ("backbone.", f"{of_hugging_face}."):
        if any(name.startswith(prefix) for name in names):
            return prefix
    return ""


def _depth_function(model: nn.Module, scheme: str) -> Callable[[str], tuple[int, int]]:
    """A user's function from a name to depth and number of layers."""
    if scheme in LAYER_DEPTH_REGISTRY:
        registered: Callable[[str], tuple[int, int]] = LAYER_DEPTH_REGISTRY.get(scheme)
        return registered
    if scheme == "model" and hasattr(model, "get_layer_depth"):
        of_model: Any = model.get_layer_depth
        return of_model
    own = sorted(dict(LAYER_DEPTH_REGISTRY))
    accepted = [*_SCHEMES, "model (with a method get_layer_depth)", *own]
    raise ValueError(f"unknown scheme {scheme!r}; accepted: {', '.join(accepted)}")


def names_of_parameters(model: nn.Module) -> dict[Tensor, list[str]]:
    """Each parameter with all its names, in the order of the model; a shared one has several."""
    names: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return names


class _Scheme(NamedTuple):
    needs: str  # the argument that has the number n of blocks; "": 4 stages
    stem: str
    # of a block; gets the argument, a name, and all names
    depth_of: Callable[[Any, str, Sequence[str]], int | None]
    rest: int = 1  # the depth of the rest is n + rest
    num_layers: int = 2  # there are n + num_layers layers
    deepest: int | None = None  # the depth of the last block; None: n


def _named_depths(
    argument: Any,
    scheme: str,
    names: Sequence[str],
    prefix: str,
    shared: Iterable[Sequence[str]],
) -> dict[str, tuple[int, int]]:
    """Name -> depth and number of layers.

    ``argument``: the number of blocks, or the numbers of each stage. ``shared``: all names of each parameter.
    """
    rule = _SCHEMES[scheme]
    num_blocks = argument if isinstance(argument, int) else sum(argument)
    own = [name for name in names if name.startswith(prefix)]
    without_prefix = [name.removeprefix(prefix) for name in own]
    depths: dict[str, int | None] = {}
    for name, short in zip(own, without_prefix, strict=True):
        if re.match(rule.stem, short):
            depths[name] = 0
        else:
            depths[name] = rule.depth_of(argument, short, without_prefix)
    for shared_names in shared:
        known_depths = []
        for name in shared_names:
            depth = depths.get(name)
            if depth is not None:
                known_depths.append(depth)
        if known_depths:
            depths |= dict.fromkeys(shared_names, min(known_depths))
    _refuse_rest_before_blocks(scheme, depths)
    known = {depth: name for name, depth in depths.items() if depth is not None}
    if not known:
        text = f"no parameter has a name of the scheme {scheme!r} after the prefix {prefix!r}"
        raise ValueError(f"{text}: {', '.join(names[:3])}")
    last = num_blocks if rule.deepest is None else rule.deepest
    if max(known) != last:
        deepest = f"{known[max(known)]} at depth {max(known)}"
        raise ValueError(
            f"num_layers or depths put the last layer at {last}, but the deepest one is {deepest}"
        )
    of_rest = num_blocks + rule.rest
    count = num_blocks + rule.num_layers
    found: dict[str, tuple[int, int]] = {}
    rest: list[str] = []
    for name in names:
        depth = depths.get(name)
        if depth is None:
            rest.append(name)
            depth = of_rest
        found[name] = depth, count
    shown = ", ".join(rest[:20]) or "none"
    if len(rest) > 20:
        shown += ", ..."
    report = "Layer decay %r: %d parameters are the rest, at depth %d of %d: %s"
    _logger.info(report, scheme, len(rest), of_rest, count - 1, shown)
    return found


def _refuse_rest_before_blocks(scheme: str, depths: Mapping[str, int | None]) -> None:
    """Raises ValueError if a parameter before the first block has no depth: it is no part of the last layer."""
    before: list[str] = []
    for name, depth in depths.items():
        if depth is None:
            before.append(name)
        elif depth > 0:
            break
    else:
        return  # no block; the caller raises an error
    if before:
        raise ValueError(
            f"scheme {scheme!r} would give the rate of the last layer to "
            f"{', '.join(before[:5])}, which the model "
            "defines before its first block. If it is a part of a head, define it after the "
            "blocks; else say its "
            "depth by a method get_layer_depth of the model and the scheme 'model', or in "
            "LAYER_DEPTH_REGISTRY"
        )


def _in_vit(_: int, name: str, __: Sequence[str]) -> int | None:
    block = re.match(r"(?:encoder\.)?(?:layers?|blocks)\.(\d+)\.", name)
    if block is None:
        return None
    return int(block[1]) + 1


def _place(name: str) -> tuple[int, int | None] | None:
    """The stage and the block of a parameter, None as the block of downsampling; None if it is in no stage."""
    place = (
        r"(?:encoder\.)?(?:stages|layers)\.(\d+)\.(?:downsampl\w+|(?:(?:blocks|layers)\.)?(\d+))\."
    )
    found = re.match(place, name) or re.match(r"downsample_layers\.(\d+)()\.", name)
    if found is None:
        return None
    stage = int(found[1])
    block = int(found[2]) if found[2] else None
    return stage, block


def _in_stages(depths: Sequence[int], name: str, names: Sequence[str]) -> int | None:
    place = _place(name)
    if place is None:
        return None
    stage, block = place
    if block is None:
        # OpenMMLab downsamples at the end of a stage, timm at the start, so timm's first stage has no downsampling
        is_at_end = any(_place(other) == (0, None) for other in names)
        num_stages_before = stage + 1 if is_at_end else stage
        return sum(depths[:num_stages_before])
    if stage >= len(depths) or block >= depths[stage]:
        raise ValueError(
            f"depths={list(depths)} has no place for {name}; give the number of blocks of each "
            "stage"
        )
    return sum(depths[:stage]) + block + 1


def _in_convnext(num_layers: int, name: str, _: Sequence[str]) -> int | None:
    place = _place(name)
    if place is None:
        return None
    stage, block = place
    if block is None:
        return (0, 2, 3, num_layers)[stage]
    return (1, 2, 3 + block // 3, num_layers)[stage]


def _in_stages_of_convnext(_: int, name: str, __: Sequence[str]) -> int | None:
    place = _place(name)
    if place is None:
        return None
    stage, block = place
    return 0 if block is None else stage + 1


# names in OpenMMLab, timm and Hugging Face
_STEM = (
    r"(?:cls|class|dist|distillation|reg|register|mask)_tokens?$|(?:absolute_)?pos_embed(?:$|\.)"
    r"|(?:patch_embed|embeddings|norm_pre|pre_norm|ln_pre|rel_pos_bias)\."
)
_STEM_OF_CONVNEXT = rf"{_STEM}|stem\."
_VIT = _Scheme("num_layers", _STEM, _in_vit)
_SCHEMES = {
    "vit": _VIT,
    "beit": _VIT,
    "mae": _VIT,
    "swin": _Scheme("depths", _STEM, _in_stages),
    "mixmim": _Scheme("depths", _STEM, _in_stages, rest=0, num_layers=1),
    "mixmim_mmselfsup": _Scheme("depths", _STEM, _in_stages, rest=0),
    "convnext": _Scheme("num_layers", _STEM_OF_CONVNEXT, _in_convnext),
    "convnext_stage": _Scheme("", _STEM_OF_CONVNEXT, _in_stages_of_convnext, deepest=4),
    "convnext_stage_mmseg": _Scheme(
        "num_layers", _STEM_OF_CONVNEXT, _in_stages_of_convnext, deepest=4
    ),
}
