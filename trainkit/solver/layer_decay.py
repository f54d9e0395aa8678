"""A learning rate that falls from the last layer of a model to the first one."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from trainkit.utils.registry import Registry

LAYER_DEPTH_REGISTRY = Registry("LAYER_DEPTH")
"""Functions from a parameter's full name to ``(depth, num_layers)``: depth 0 is first, ``num_layers - 1`` last."""

_STEM = re.compile(r"(?:cls_token|mask_token|pos_embed)$|patch_embed\.")
_VIT_BLOCK = re.compile(r"(?:layers|blocks)\.(\d+)\.")
_SWIN_STEM = re.compile(r"mask_token$|patch_embed\.")
_MIXMIM_STEM = re.compile(r"(?:absolute_)?pos_embed$|patch_embed\.")
_STAGE_BLOCK = re.compile(r"(?:stages|layers)\.(\d+)\.blocks\.(\d+)\.")
_STAGE_DOWNSAMPLE = re.compile(r"(?:stages|layers)\.(\d+)\.downsample\.")
_CONVNEXT_BLOCK = re.compile(r"stages\.([0-3])\.(\d+)\.")
_CONVNEXT_DOWNSAMPLE = re.compile(r"downsample_layers\.([0-3])\.")


@dataclass(frozen=True)
class _Layers:
    """How deep the parameters of a backbone are, by their name without prefix."""

    depth_of: Callable[[str], int | None]  # None: behind the blocks, as all heads are
    last_block: int
    rest: int
    num_layers: int


def build_layer_decay(
    model: nn.Module,
    rate: float,
    scheme: str,
    num_layers: int | None = None,
    depths: Sequence[int] | None = None,
    prefix: str | None = None,
) -> Callable[[str], float]:
    """A function from a parameter's full name to the factor ``rate ** (num_layers - 1 - depth)``.

    It fits ``ParamRules.lr_factor_func`` and that of ``get_default_optimizer_params``. Only learning rates depend on
    the depth: what has no weight decay is said by the other rules (OpenMMLab's constructors do both at once).

    ============================  ============  ===============================================================
    ``scheme``                    takes         depth
    ============================  ============  ===============================================================
    ``vit``, ``beit``, ``mae``    num_layers    tokens, position and patch embedding 0; block b: b + 1; rest last
    ``swin``                      depths        mask token and patch embedding 0; blocks, counted through all
                                                stages: b + 1; a stage's downsampling as its last block; rest last,
                                                ``absolute_pos_embed`` too
    ``mixmim``                    depths        as ``swin`` with the position embedding at 0 and the rest
                                                beside the last block, whose factor so is 1
    ``mixmim_mmselfsup``          depths        as MMSelfSup: every factor of ``mixmim`` once more times ``rate``
    ``convnext``                  num_layers    layer-wise: stages 0 and 1 are one layer each, stage 2 one per three
                                                blocks, stage 3 one; num_layers is 6 or 12 in the paper
    ``convnext_stage``            nothing       stem and all downsampling 0, stage s: s + 1, rest 5
    ``convnext_stage_mmseg``      num_layers    as MMSegmentation: the rest at num_layers + 1, so that the factor
                                                of the last stage depends on num_layers and is far from 1
    ``model``                     nothing       ``model.get_layer_depth(name)`` gives ``(depth, num_layers)``
    in ``LAYER_DEPTH_REGISTRY``   nothing       likewise
    ============================  ============  ===============================================================

    Args:
        rate: in (0, 1].
        num_layers: number of blocks (``vit``), or of layers (``convnext``).
        depths: number of blocks of each stage.
        prefix: what the names of the backbone's parameters begin with, as ``encoder.``; everything else is the rest.
            None is ``backbone.`` if there are such parameters, else nothing. For the schemes with a table row only.

    Raises:
        ValueError: the scheme is unknown, does not fit the model's names, or lacks an argument or has one too many.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"rate must be in (0, 1], got {rate}")
    names = [name for name, _ in model.named_parameters()]
    if scheme in _SCHEMES:
        needed, layers_of = _SCHEMES[scheme]
        _check_arguments(scheme, needed, {"num_layers": num_layers, "depths": depths})
        layers = layers_of(*(value for value in (num_layers, depths) if value))
        found = _named_depths(layers, scheme, names, prefix)
    else:
        _check_arguments(scheme, None, {"num_layers": num_layers, "depths": depths, "prefix": prefix})
        found = _users_depths(_users_function(model, scheme), scheme, names)
    factors = {name: rate ** (count - 1 - depth) for name, (depth, count) in found.items()}
    return factors.__getitem__


def _named_depths(layers: _Layers, scheme: str, names: Sequence[str], prefix: str | None) -> dict[str, tuple[int, int]]:
    if prefix is None:
        prefix = "backbone." if any(name.startswith("backbone.") for name in names) else ""
    depths = {name: layers.depth_of(name.removeprefix(prefix)) for name in names if name.startswith(prefix)}
    known = {depth: name for name, depth in depths.items() if depth is not None}
    if not known:
        raise ValueError(
            f"no parameter has a name of the scheme {scheme!r} behind the prefix {prefix!r} (there are "
            f"{', '.join(names[:3])}, ...); give another prefix or scheme, or a get_layer_depth(name) to the model and "
            "scheme 'model'"
        )
    if max(known) != layers.last_block:
        raise ValueError(
            f"the deepest layer of this model is {known[max(known)]} at depth {max(known)}, but num_layers or depths "
            f"of the scheme {scheme!r} put the last one at {layers.last_block}; correct them"
        )
    found = {name: depths.get(name) for name in names}
    return {name: (layers.rest if depth is None else depth, layers.num_layers) for name, depth in found.items()}


def _users_function(model: nn.Module, scheme: str) -> Callable[[str], tuple[int, int]]:
    if scheme in LAYER_DEPTH_REGISTRY:
        return LAYER_DEPTH_REGISTRY.get(scheme)
    if scheme != "model":
        registered = sorted(name for name, _ in LAYER_DEPTH_REGISTRY)
        raise ValueError(
            f"unknown scheme {scheme!r}; accepted: {', '.join([*_SCHEMES, 'model', *registered])}. The module that "
            "registers one must have been imported: name it in IMPORTS of the config"
        )
    function = getattr(model, "get_layer_depth", None)
    if function is None:
        raise ValueError(
            f"scheme 'model': {type(model).__name__} has no get_layer_depth(name), which gives (depth, num_layers); "
            "write one"
        )
    return function


def _users_depths(
    function: Callable[[str], tuple[int, int]], scheme: str, names: Iterable[str]
) -> dict[str, tuple[int, int]]:
    found = {name: function(name) for name in names}
    for name, (depth, num_layers) in found.items():
        if not 0 <= depth < num_layers:
            raise ValueError(
                f"scheme {scheme!r}: the depth of {name} must be between 0 and num_layers - 1, got "
                f"({depth}, {num_layers})"
            )
    return found


def _check_arguments(scheme: str, needed: str | None, arguments: Mapping[str, object]) -> None:
    if needed is not None and not arguments[needed]:
        raise ValueError(f"scheme {scheme!r} needs {needed} ({needed.upper()}); see build_layer_decay")
    for name, value in arguments.items():
        if value and name != needed:
            raise ValueError(f"scheme {scheme!r} does not take {name} ({name.upper()}), got {value!r}; leave it out")


def _vit(num_layers: int) -> _Layers:
    def depth_of(name: str) -> int | None:
        if _STEM.match(name):
            return 0
        block = _VIT_BLOCK.match(name)
        return int(block[1]) + 1 if block else None

    return _Layers(depth_of, last_block=num_layers, rest=num_layers + 1, num_layers=num_layers + 2)


def _hierarchical(depths: Sequence[int], stem: re.Pattern[str]) -> Callable[[str], int | None]:
    def depth_of(name: str) -> int | None:
        if stem.match(name):
            return 0
        if downsample := _STAGE_DOWNSAMPLE.match(name):
            return sum(depths[: int(downsample[1]) + 1])
        block = _STAGE_BLOCK.match(name)
        if not block:
            return None
        stage, index = int(block[1]), int(block[2])
        if stage >= len(depths) or index >= depths[stage]:
            raise ValueError(f"depths={list(depths)} has no place for {name}; give the number of blocks of each stage")
        return sum(depths[:stage]) + index + 1

    return depth_of


def _swin(depths: Sequence[int]) -> _Layers:
    blocks = sum(depths)
    return _Layers(_hierarchical(depths, _SWIN_STEM), last_block=blocks, rest=blocks + 1, num_layers=blocks + 2)


def _mixmim(depths: Sequence[int]) -> _Layers:
    blocks = sum(depths)
    return _Layers(_hierarchical(depths, _MIXMIM_STEM), last_block=blocks, rest=blocks, num_layers=blocks + 1)


def _mixmim_mmselfsup(depths: Sequence[int]) -> _Layers:
    blocks = sum(depths)
    return _Layers(_hierarchical(depths, _MIXMIM_STEM), last_block=blocks, rest=blocks, num_layers=blocks + 2)


def _convnext(num_layers: int) -> _Layers:
    def depth_of(name: str) -> int | None:
        if _STEM.match(name):
            return 0
        if downsample := _CONVNEXT_DOWNSAMPLE.match(name):
            return (0, 2, 3, num_layers)[int(downsample[1])]
        block = _CONVNEXT_BLOCK.match(name)
        return (1, 2, 3 + int(block[2]) // 3, num_layers)[int(block[1])] if block else None

    return _Layers(depth_of, last_block=num_layers, rest=num_layers + 1, num_layers=num_layers + 2)


def _convnext_stage_depth(name: str) -> int | None:
    if _STEM.match(name) or _CONVNEXT_DOWNSAMPLE.match(name):
        return 0
    block = _CONVNEXT_BLOCK.match(name)
    return int(block[1]) + 1 if block else None


def _convnext_stage() -> _Layers:
    return _Layers(_convnext_stage_depth, last_block=4, rest=5, num_layers=6)


def _convnext_stage_mmseg(num_layers: int) -> _Layers:
    return _Layers(_convnext_stage_depth, last_block=4, rest=num_layers + 1, num_layers=num_layers + 2)


# name -> the argument that it needs, and how it counts
_SCHEMES: dict[str, tuple[str | None, Callable[..., _Layers]]] = {
    "vit": ("num_layers", _vit),
    "beit": ("num_layers", _vit),
    "mae": ("num_layers", _vit),
    "swin": ("depths", _swin),
    "mixmim": ("depths", _mixmim),
    "mixmim_mmselfsup": ("depths", _mixmim_mmselfsup),
    "convnext": ("num_layers", _convnext),
    "convnext_stage": (None, _convnext_stage),
    "convnext_stage_mmseg": ("num_layers", _convnext_stage_mmseg),
}
