import pytest
import torch
from torch import nn

from trainkit.solver import (
    LAYER_DEPTH_REGISTRY,
    ParamRules,
    build_layer_decay,
    build_param_groups,
    get_default_optimizer_params,
)


class Named(nn.Module):
    """A model with parameters of given full names, and nothing else."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            *path, leaf = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(leaf, nn.Parameter(torch.zeros(1, 1)))


def factors(names, rate, scheme, **arguments):
    factor_of = build_layer_decay(Named(names), rate, scheme, **arguments)
    return {name: factor_of(name) for name in names}


def powers(exponents, rate):
    """Expected factors, from name -> exponent of the rate."""
    return {name: pytest.approx(rate**exponent, rel=1e-12) for name, exponent in exponents.items()}


def test_the_printed_factors_of_vit_and_of_the_stages_of_convnext():
    names = ["cls_token", *(f"layers.{b}.attn.qkv.weight" for b in range(12)), "ln1.weight"]
    found = factors(names, 0.75, "vit", num_layers=12)
    assert found["cls_token"] == pytest.approx(0.023757, abs=1e-6)
    assert [found[name] for name in names[-3:]] == [0.5625, 0.75, 1.0]
    stages = ["downsample_layers.3.0.weight", *(f"stages.{s}.1.gamma" for s in range(4)), "head.weight"]
    for num_layers, expected in {
        12: [0.2542, 0.2824, 0.3138, 0.3487, 0.3874, 1.0],
        6: [0.4783, 0.5314, 0.5905, 0.6561, 0.729, 1.0],
    }.items():
        found = factors(stages, 0.9, "convnext_stage_mmseg", num_layers=num_layers)
        assert [*found.values()] == pytest.approx(expected, abs=5e-5)


MIXMIM = {  # depths 2, 1, 3, so 7 layers
    "patch_embed.proj.weight": 6,
    "absolute_pos_embed": 6,
    "pos_embed": 6,
    "layers.0.blocks.0.norm1.weight": 5,
    "layers.0.blocks.1.norm1.weight": 4,
    "layers.0.downsample.norm.weight": 4,
    "layers.1.blocks.0.norm1.weight": 3,
    "layers.1.downsample.reduction.weight": 3,
    "layers.2.blocks.0.norm1.weight": 2,
    "layers.2.blocks.1.norm1.weight": 1,
    "layers.2.blocks.2.norm1.weight": 0,
    "norm.weight": 0,
}


def test_mixmim_names_by_default_without_and_by_name_with_mmselfsups_extra_factor():
    assert factors([*MIXMIM], 0.7, "mixmim", depths=(2, 1, 3)) == powers(MIXMIM, 0.7)
    extra = {name: exponent + 1 for name, exponent in MIXMIM.items()}
    assert factors([*MIXMIM], 0.7, "mixmim_mmselfsup", depths=(2, 1, 3)) == powers(extra, 0.7)


def test_a_prefix_can_be_given_and_what_is_outside_is_not_scaled():
    exponents = {"student.encoder.patch_embed.weight": 2, "student.encoder.blocks.0.weight": 1}
    exponents |= {"patch_embed.weight": 0, "blocks.0.weight": 0}
    found = factors([*exponents], 0.5, "vit", num_layers=1, prefix="student.encoder.")
    assert found == powers(exponents, 0.5)


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)

    def get_layer_depth(self, name):
        return {"first": 0, "second": 1, "third": 2}[name.split(".")[0]], 3


@LAYER_DEPTH_REGISTRY.register()
def solver_test_depth(name):
    return (0, 2) if name.startswith("first") else (1, 2)


@LAYER_DEPTH_REGISTRY.register()
def solver_test_bad_depth(name):
    return 2, 2


def test_a_users_model_or_a_registered_function_says_the_depth_which_multiplies_the_other_rules():
    model = Pyramid()
    for scheme, expected in {"model": [0.25, 0.5, 1.0], "solver_test_depth": [0.5, 1.0, 1.0]}.items():
        factor_of = build_layer_decay(model, 0.5, scheme)
        assert [factor_of(name) for name in ("first.weight", "second.bias", "third.weight")] == expected
    by_depth = build_layer_decay(model, 0.5, "model")
    rules = ParamRules(lr_factors={"bias": 2.0}, custom_keys={"first": {"lr_factor": 0.5}}, lr_factor_func=by_depth)
    groups = build_param_groups(model, 1.0, 0.1, rules)
    lrs = {param: group["lr"] for group in groups for param in group["params"]}
    assert [lrs[param] for param in model.parameters()] == [0.125, 0.25, 0.5, 1.0, 1.0, 2.0]
    groups = get_default_optimizer_params(model, 1.0, lr_factor_func=by_depth)  # detectron2's argument
    assert [group["lr"] for group in groups] == [0.25, 0.5, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "resnet"}, "unknown scheme 'resnet'; accepted: vit, beit, .*, model .*, solver_test_depth"),
        ({"scheme": "swin", "depths": ()}, r"'swin' needs depths \(DEPTHS\)"),
        ({"scheme": "swin", "depths": (1, 1)}, r"depths=\[1, 1\] has no place for stages.0.blocks.1"),
        ({"scheme": "solver_test_bad_depth"}, r"the depth of patch_embed.weight must be in \[0, 2\), got 2"),
        ({"scheme": "vit", "num_layers": 1}, "last layer at 1, but the deepest one is blocks.1.weight at depth 2"),
        ({"scheme": "vit", "num_layers": 3}, "put the last layer at 3"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_an_error(arguments, message):
    names = ["patch_embed.weight", "blocks.0.weight", "blocks.1.weight", "stages.0.blocks.1.w", "head.weight"]
    with pytest.raises(ValueError, match=message):
        build_layer_decay(Named(names), 0.5, **arguments)


# ---------------------------------------------------------------------- names of libraries

# library -> prefix, stem, block, rest, head
VITS = {
    "OpenMMLab": ("backbone.", "cls_token pos_embed patch_embed.projection.b mask_token", "layers", "ln1.w", "head.w"),
    "timm": ("", "cls_token pos_embed patch_embed.proj.weight", "blocks", "norm.weight", "head.bias"),
    "Hugging Face": (
        *("vit.", "embeddings.cls_token embeddings.projection.w", "encoder.layer", "layernorm.w", "classifier.w"),
    ),
}
# library -> prefix, stem, stage, rest; the stage of the downsampling after stage s is s, or s + 1
SWINS = {
    "OpenMMLab": ("backbone.", "mask_token patch_embed.projection.w", "stages", 0, "norm3.w absolute_pos_embed"),
    "timm": ("", "patch_embed.proj.weight", "layers", 1, "norm.weight"),
    "Hugging Face": ("swin.", "embeddings.norm.weight embeddings.proj.w", "encoder.layers", 0, "layernorm.weight"),
}
# library -> prefix, stem, downsampling before a stage, block, rest
CONVNEXTS = {
    "OpenMMLab": ("backbone.", "downsample_layers.0.1.w", "downsample_layers.{s}", "stages.{s}.{b}", "norm3.weight"),
    "timm": ("", "stem.0.weight stem.1.bias", "stages.{s}.downsample", "stages.{s}.blocks.{b}", "head.norm.weight"),
    "Hugging Face": (
        *("convnext.", "embeddings.layernorm.weight"),
        *("encoder.stages.{s}.downsampling_layer", "encoder.stages.{s}.layers.{b}", "layernorm.weight"),
    ),
}


def check(prefix, expected, head, last, scheme, **arguments):
    """Every factor is ``rate ** (last - depth)``, of every parameter; None: the rest, as the head."""
    exponents = {prefix + name: 0 if depth is None else last - depth for name, depth in expected.items()}
    exponents[head] = 0
    model = Named(list(exponents))
    model.base_model_prefix = prefix.removesuffix(".")  # of Hugging Face
    factor_of = build_layer_decay(model, 0.75, scheme, **arguments)
    assert {name: factor_of(name) for name, _ in model.named_parameters()} == powers(exponents, 0.75)


@pytest.mark.parametrize("library", VITS)
def test_the_names_of_a_vit(library):
    prefix, stem, block, rest, head = VITS[library]
    depths = dict.fromkeys(stem.split(), 0) | {f"{block}.{b}.attn.qkv.bias": b + 1 for b in range(12)} | {rest: None}
    for scheme in ("vit", "beit", "mae"):
        check(prefix, depths, head, 13, scheme, num_layers=12)


@pytest.mark.parametrize("library", SWINS)
def test_the_names_of_a_swin(library):
    prefix, stem, stage, offset, rest = SWINS[library]
    depths, done = dict.fromkeys(stem.split(), 0) | dict.fromkeys(rest.split()), 0
    for s, size in enumerate((2, 2, 6, 2)):
        depths |= {f"{stage}.{s}.blocks.{b}.norm1.weight": done + b + 1 for b in range(size)}
        done += size
        if s < 3:
            depths[f"{stage}.{s + offset}.downsample.reduction.weight"] = done
    check(prefix, depths, "head.fc.weight", 13, "swin", depths=(2, 2, 6, 2))


@pytest.mark.parametrize("library", CONVNEXTS)
def test_the_names_of_a_convnext(library):
    prefix, stem, downsampling, block, rest = CONVNEXTS[library]
    for num_layers, blocks in ((6, (3, 3, 9, 3)), (12, (3, 3, 27, 3))):
        by_layer = dict.fromkeys(stem.split(), 0) | {rest: None}
        by_stage = dict(by_layer)
        for s, size in enumerate(blocks):
            if s:
                name = downsampling.format(s=s) + ".0.weight"
                by_layer[name], by_stage[name] = [0, 2, 3, num_layers][s], 0
            for b in range(size):
                name = block.format(s=s, b=b) + ".gamma"
                by_layer[name], by_stage[name] = [1, 2, 3 + b // 3, num_layers][s], s + 1
        check(prefix, by_layer, "decode_head.weight", num_layers + 1, "convnext", num_layers=num_layers)
        check(prefix, by_stage, "decode_head.weight", 5, "convnext_stage")
