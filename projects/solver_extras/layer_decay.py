"""Learning rates that fall from the last layer of a model to the first."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from trainkit.utils.registry import Registry

LAYER_DEPTH_REGISTRY = Registry("LAYER_DEPTH")
"""Functions from a parameter's full name to ``(depth, num_layers)``: depth 0 is first, ``num_layers - 1`` last."""

# names in OpenMMLab, timm and Hugging Face
_STEM = r"(?:cls_token|mask_token|pos_embed)$|(?:patch_embed|embeddings)\."
_STEM_OF_SWIN = r"mask_token$|(?:patch_embed|embeddings)\."
_STEM_OF_MIXMIM = r"(?:absolute_)?pos_embed$|patch_embed\."
_STEM_OF_CONVNEXT = rf"{_STEM}|stem\."
_BLOCK_OF_VIT = re.compile(r"(?:encoder\.)?(?:layers?|blocks)\.(\d+)\.")
_BLOCK_OF_STAGE = re.compile(r"(?:encoder\.)?(?:stages|layers)\.(\d+)\.blocks\.(\d+)\.")
_DOWNSAMPLE_OF_STAGE = re.compile(r"(?:encoder\.)?(?:stages|layers)\.(\d+)\.downsample\.")
_BLOCK_OF_CONVNEXT = re.compile(r"(?:encoder\.)?stages\.([0-3])\.(?:(?:blocks|layers)\.)?(\d+)\.")
_DOWNSAMPLE_OF_CONVNEXT = re.compile(r"(?:downsample_layers\.([0-3])|(?:encoder\.)?stages\.([0-3])\.downsampl\w+)\.")


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

    ============================  ============  ===============================================================
    ``scheme``                    takes         depth
    ============================  ============  ===============================================================
    ``vit``, ``beit``, ``mae``    num_layers    tokens, position and patch embedding 0; block b: b + 1; rest last
    ``swin``                      depths        mask token and patch embedding 0; blocks, counted through all
                                                stages: b + 1; downsampling like the block before it; rest last,
                                                with ``absolute_pos_embed``
    ``mixmim``                    depths        as ``swin``, but position embedding 0, and the rest at the depth
                                                of the last block, so that its factor is 1
    ``mixmim_mmselfsup``          depths        as MMSelfSup: every factor of ``mixmim`` once more times ``rate``
    ``convnext``                  num_layers    layer-wise: stages 0 and 1 are one layer each, stage 2 one per three
                                                blocks, stage 3 one; num_layers is 6 or 12 in the paper
    ``convnext_stage``            nothing       stem and all downsampling 0, stage s: s + 1, rest 5
    ``convnext_stage_mmseg``      num_layers    as MMSegmentation: the rest at num_layers + 1, so that the factor
                                                of the last stage depends on num_layers and is far from 1
    ``model``                     nothing       ``model.get_layer_depth(name)`` gives ``(depth, num_layers)``
    in ``LAYER_DEPTH_REGISTRY``   nothing       the function, called with a name, gives the same pair
    ============================  ============  ===============================================================

    Names of OpenMMLab, timm (``blocks.3.``, ``stages.2.blocks.0.``, ``stem.``) and Hugging Face (``embeddings.``,
    ``encoder.layer.3.``, ``encoder.stages.2.layers.0.``) are recognized.

    Args:
        rate: the factor from a layer to the layer before it, in (0, 1].
        num_layers: number of blocks (``vit``), or of layers (``convnext``).
        depths: number of blocks of each stage.
        prefix: start of the names of the backbone's parameters, such as ``encoder.``; all other parameters are the
            rest. None: ``backbone.`` or the ``base_model_prefix`` of a Hugging Face model, if there are such
            parameters, else nothing. Only for the named schemes above.

    Raises:
        ValueError: the scheme is unknown or does not fit the model's names; an argument is missing or wrong.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"rate must be in (0, 1], got {rate}")
    names = [name for name, _ in model.named_parameters()]
    needed = _SCHEMES[scheme][0] if scheme in _SCHEMES else None
    given = {"num_layers": num_layers, "depths": depths} | ({} if scheme in _SCHEMES else {"prefix": prefix})
    if needed is not None and not given[needed]:
        raise ValueError(f"scheme {scheme!r} needs {needed} ({needed.upper()}); see build_layer_decay")
    for name, value in given.items():
        if value and name != needed:
            raise ValueError(f"scheme {scheme!r} does not take {name} ({name.upper()}), got {value!r}; leave it out")
    if scheme not in _SCHEMES:
        found = _users_depths(model, scheme, names)
    else:
        if prefix is None:
            usual = ("backbone.", f"{getattr(model, 'base_model_prefix', 'backbone')}.")
            prefix = next((part for part in usual if any(name.startswith(part) for name in names)), "")
        found = _named_depths(given[needed] if needed else 4, scheme, names, prefix)
    factors = {name: rate ** (count - 1 - depth) for name, (depth, count) in found.items()}
    return factors.__getitem__


def _named_depths(argument: Any, scheme: str, names: Sequence[str], prefix: str) -> dict[str, tuple[int, int]]:
    """The function for a named scheme; ``argument``: the number of blocks, or the numbers of blocks of the stages."""
    _, stem, depth_of, rest, num_layers, last_block = _SCHEMES[scheme]
    num_blocks = argument if isinstance(argument, int) else sum(argument)
    last_block = num_blocks if last_block is None else last_block
    own_names = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    depths = {own_names[own]: 0 if re.match(stem, own) else depth_of(argument, own, [*own_names]) for own in own_names}
    known = {depth: name for name, depth in depths.items() if depth is not None}
    if not known:
        found_names = ", ".join(names[:3])
        raise ValueError(f"no parameter has a name of the scheme {scheme!r} after the prefix {prefix!r}: {found_names}")
    if max(known) != last_block:
        deepest = f"{known[max(known)]} at depth {max(known)}"
        raise ValueError(f"num_layers or depths put the last layer at {last_block}, but the deepest one is {deepest}")
    found = {name: depths.get(name) for name in names}
    return {
        name: (num_blocks + rest if depth is None else depth, num_blocks + num_layers) for name, depth in found.items()
    }


def _users_depths(model: nn.Module, scheme: str, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    if scheme == "model":
        if not hasattr(model, "get_layer_depth"):
            name = type(model).__name__
            raise ValueError(f"scheme 'model' needs a method get_layer_depth(name) of {name}; write one")
        function: Any = model.get_layer_depth
    elif scheme in LAYER_DEPTH_REGISTRY:
        function = LAYER_DEPTH_REGISTRY.get(scheme)
    else:
        registered = sorted(name for name, _ in LAYER_DEPTH_REGISTRY)
        accepted = ", ".join([*_SCHEMES, "model", *registered])
        raise ValueError(f"unknown scheme {scheme!r}; accepted: {accepted}")
    found: dict[str, tuple[int, int]] = {name: function(name) for name in names}
    for name, (depth, num_layers) in found.items():
        if not 0 <= depth < num_layers:
            raise ValueError(f"scheme {scheme!r}: the depth of {name} must be in [0, {num_layers}), got {depth}")
    return found


def _vit_depth(_: int, name: str, __: Sequence[str]) -> int | None:
    block = _BLOCK_OF_VIT.match(name)
    return int(block[1]) + 1 if block else None


def _depth_in_stages(depths: Sequence[int], name: str, names: Sequence[str]) -> int | None:
    if downsample := _DOWNSAMPLE_OF_STAGE.match(name):
        stages = {match[1] for match in map(_DOWNSAMPLE_OF_STAGE.match, names) if match}
        # OpenMMLab downsamples at the end of a stage, timm at the start, so timm's first stage has no downsampling
        stage = int(downsample[1])
        return sum(depths[: stage + ("0" in stages)])
    block = _BLOCK_OF_STAGE.match(name)
    if not block:
        return None
    stage, index = int(block[1]), int(block[2])
    if stage >= len(depths) or index >= depths[stage]:
        raise ValueError(f"depths={list(depths)} has no place for {name}; give the number of blocks of each stage")
    return sum(depths[:stage]) + index + 1


def _convnext_depth(num_layers: int, name: str, _: Sequence[str]) -> int | None:
    if downsample := _DOWNSAMPLE_OF_CONVNEXT.match(name):
        return (0, 2, 3, num_layers)[int(downsample[1] or downsample[2])]
    block = _BLOCK_OF_CONVNEXT.match(name)
    return (1, 2, 3 + int(block[2]) // 3, num_layers)[int(block[1])] if block else None


def _convnext_stage_depth(_: int, name: str, __: Sequence[str]) -> int | None:
    if _DOWNSAMPLE_OF_CONVNEXT.match(name):
        return 0
    block = _BLOCK_OF_CONVNEXT.match(name)
    return int(block[1]) + 1 if block else None


# name -> (argument that it needs, stem, depth of a block, what is added to the number of blocks n for the depth of the
# rest and for the number of layers, depth of the last block if it is not n)
_SCHEMES: dict[str, tuple[str | None, str, Callable[..., int | None], int, int, int | None]] = {
    "vit": ("num_layers", _STEM, _vit_depth, 1, 2, None),
    "beit": ("num_layers", _STEM, _vit_depth, 1, 2, None),
    "mae": ("num_layers", _STEM, _vit_depth, 1, 2, None),
    "swin": ("depths", _STEM_OF_SWIN, _depth_in_stages, 1, 2, None),
    "mixmim": ("depths", _STEM_OF_MIXMIM, _depth_in_stages, 0, 1, None),
    "mixmim_mmselfsup": ("depths", _STEM_OF_MIXMIM, _depth_in_stages, 0, 2, None),
    "convnext": ("num_layers", _STEM_OF_CONVNEXT, _convnext_depth, 1, 2, None),
    "convnext_stage": (None, _STEM_OF_CONVNEXT, _convnext_stage_depth, 1, 2, 4),
    "convnext_stage_mmseg": ("num_layers", _STEM_OF_CONVNEXT, _convnext_stage_depth, 1, 2, 4),
}
