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


VIT = {"cls_token": 13, "mask_token": 13, "pos_embed": 13, "patch_embed.projection.weight": 13}
VIT |= {f"layers.{b}.attn.qkv.weight": 12 - b for b in range(12)}
VIT |= {"ln1.weight": 0}


@pytest.mark.parametrize("scheme", ["vit", "beit", "mae"])
@pytest.mark.parametrize("blocks", ["layers", "blocks"])
@pytest.mark.parametrize("prefix", ["", "backbone."])
def test_vit_names(scheme, blocks, prefix):
    exponents = {prefix + name.replace("layers", blocks): exponent for name, exponent in VIT.items()}
    exponents |= {"head.weight": 0, "neck.layers.0.weight": 0} if prefix else {"head.weight": 0}
    found = factors(list(exponents), 0.75, scheme, num_layers=12)
    assert found == powers(exponents, 0.75)
    assert found != powers(exponents, 0.74)


def test_the_printed_factors_of_vit():
    found = factors(list(VIT), 0.75, "vit", num_layers=12)
    assert found["cls_token"] == pytest.approx(0.023757, abs=1e-6)
    assert [found[name] for name in ("layers.10.attn.qkv.weight", "layers.11.attn.qkv.weight", "ln1.weight")] == [
        0.5625,
        0.75,
        1.0,
    ]


SWIN = {  # depths 2, 1, 3, so 8 layers
    "mask_token": 7,
    "patch_embed.projection.weight": 7,
    "stages.0.blocks.0.norm1.weight": 6,
    "stages.0.blocks.1.norm1.weight": 5,
    "stages.0.downsample.norm.weight": 5,
    "stages.0.downsample.reduction.weight": 5,
    "stages.1.blocks.0.norm1.weight": 4,
    "stages.1.downsample.reduction.weight": 4,
    "stages.2.blocks.0.norm1.weight": 3,
    "stages.2.blocks.1.norm1.weight": 2,
    "stages.2.blocks.2.norm1.weight": 1,
    "norm3.weight": 0,
    "absolute_pos_embed": 0,
}


@pytest.mark.parametrize("stages", ["stages", "layers"])
def test_swin_names(stages):
    exponents = {f"backbone.{name.replace('stages', stages)}": exponent for name, exponent in SWIN.items()}
    exponents["head.fc.weight"] = 0
    assert factors(list(exponents), 0.9, "swin", depths=(2, 1, 3)) == powers(exponents, 0.9)


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
    names = list(MIXMIM)
    assert factors(names, 0.7, "mixmim", depths=(2, 1, 3)) == powers(MIXMIM, 0.7)
    extra = {name: exponent + 1 for name, exponent in MIXMIM.items()}
    assert factors(names, 0.7, "mixmim_mmselfsup", depths=(2, 1, 3)) == powers(extra, 0.7)


def convnext(num_layers, blocks_of_stage_2):
    """Exponents of the layer-wise rule; the number of layers is num_layers + 2."""
    depths = {"downsample_layers.0.0.weight": 0, "stages.0.0.gamma": 1, "stages.0.2.gamma": 1}
    depths |= {"downsample_layers.1.0.weight": 2, "stages.1.0.gamma": 2, "stages.1.2.gamma": 2}
    depths |= {"downsample_layers.2.0.weight": 3}
    depths |= {f"stages.2.{b}.gamma": 3 + b // 3 for b in range(blocks_of_stage_2)}
    depths |= {"downsample_layers.3.0.weight": num_layers, "stages.3.0.gamma": num_layers}
    depths |= {"stages.3.2.gamma": num_layers, "norm3.weight": num_layers + 1}
    return {f"backbone.{name}": num_layers + 1 - depth for name, depth in depths.items()}


@pytest.mark.parametrize(("num_layers", "blocks"), [(6, 9), (12, 27)])
def test_convnext_names_layer_wise(num_layers, blocks):
    exponents = {**convnext(num_layers, blocks), "decode_head.weight": 0}
    assert factors(list(exponents), 0.9, "convnext", num_layers=num_layers) == powers(exponents, 0.9)
    deepest_of_stage_2 = exponents[f"backbone.stages.2.{blocks - 1}.gamma"]
    assert deepest_of_stage_2 == 2


STAGES = ["downsample_layers.3.0.weight", *(f"stages.{s}.1.gamma" for s in range(4)), "head.weight"]


@pytest.mark.parametrize(
    ("scheme", "arguments", "expected"),
    [
        ("convnext_stage_mmseg", {"num_layers": 12}, [0.2542, 0.2824, 0.3138, 0.3487, 0.3874, 1.0]),
        ("convnext_stage_mmseg", {"num_layers": 6}, [0.4783, 0.5314, 0.5905, 0.6561, 0.729, 1.0]),
        ("convnext_stage", {}, [0.59049, 0.6561, 0.729, 0.81, 0.9, 1.0]),
    ],
)
def test_convnext_names_stage_wise_by_default_without_and_by_name_with_mmsegmentations_num_layers(
    scheme, arguments, expected
):
    assert list(factors(STAGES, 0.9, scheme, **arguments).values()) == pytest.approx(expected, abs=5e-5)
    depths = [0, 1, 2, 3, 4]
    count = arguments.get("num_layers", 4) + 2
    exact = [0.9 ** (count - 1 - depth) for depth in depths] + [1.0]
    assert list(factors(STAGES, 0.9, scheme, **arguments).values()) == pytest.approx(exact, rel=1e-12)


def test_tokens_of_convnext_are_first():
    found = factors(["mask_token", *STAGES], 0.9, "convnext_stage")
    assert found["mask_token"] == found["downsample_layers.3.0.weight"] != found["head.weight"]


def test_a_prefix_can_be_given_and_what_is_outside_is_not_scaled():
    exponents = {"student.encoder.patch_embed.weight": 2, "student.encoder.blocks.0.weight": 1}
    exponents |= {"patch_embed.weight": 0, "blocks.0.weight": 0}
    found = factors(list(exponents), 0.5, "vit", num_layers=1, prefix="student.encoder.")
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


def test_a_users_model_says_the_depth_of_its_names():
    factor_of = build_layer_decay(Pyramid(), 0.5, "model")
    assert [factor_of(name) for name in ("first.weight", "second.bias", "third.weight")] == [0.25, 0.5, 1.0]


def test_a_registered_function_says_the_depth_of_a_name():
    factor_of = build_layer_decay(Pyramid(), 0.5, "solver_test_depth")
    assert [factor_of(name) for name in ("first.weight", "second.bias", "third.weight")] == [0.5, 1.0, 1.0]


def test_the_factor_of_the_depth_multiplies_those_of_other_rules():
    model = Pyramid()
    rules = ParamRules(
        lr_factors={"bias": 2.0},
        decay_factors={"flat": 0.0},
        custom_keys={"first": {"lr_factor": 0.5}},
        lr_factor_func=build_layer_decay(model, 0.5, "model"),
    )
    groups = build_param_groups(model, 1.0, 0.1, rules)
    values = {param: (group["lr"], group["weight_decay"]) for group in groups for param in group["params"]}
    assert [values[param] for param in model.parameters()] == [
        (0.125, 0.1),
        (0.25, 0.0),
        (0.5, 0.1),
        (1.0, 0.0),
        (1.0, 0.1),
        (2.0, 0.0),
    ]


def test_the_function_fits_detectron2s_argument():
    model = Pyramid()
    groups = get_default_optimizer_params(model, 1.0, lr_factor_func=build_layer_decay(model, 0.5, "model"))
    assert [group["lr"] for group in groups] == [0.25, 0.5, 1.0]


def test_shared_and_frozen_parameters_do_not_disturb():
    model = Pyramid()
    model.third.weight = model.first.weight
    model.second.requires_grad_(False)
    rules = ParamRules(lr_factor_func=build_layer_decay(model, 0.5, "model"))
    assert [group["lr"] for group in build_param_groups(model, 1.0, None, rules)] == [0.25, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 0.0, "scheme": "vit"}, r"rate must be in \(0, 1\], got 0.0"),
        ({"rate": 1.5, "scheme": "vit"}, "rate must be in"),
        ({"scheme": "resnet"}, "unknown scheme 'resnet'; accepted: vit, beit, .*, model, .*solver_test_depth"),
        ({"scheme": "vit"}, r"'vit' needs num_layers \(NUM_LAYERS\)"),
        ({"scheme": "swin", "depths": ()}, r"'swin' needs depths \(DEPTHS\)"),
        ({"scheme": "vit", "num_layers": 2, "depths": (1,)}, r"'vit' does not take depths \(DEPTHS\), got \(1,\)"),
        ({"scheme": "convnext_stage", "num_layers": 6}, "'convnext_stage' does not take num_layers"),
        ({"scheme": "model", "prefix": "backbone."}, "'model' does not take prefix"),
        ({"scheme": "model"}, r"needs a method get_layer_depth\(name\) of Named"),
        ({"scheme": "solver_test_bad_depth"}, r"the depth of patch_embed.weight must be between .* got \(2, 2\)"),
        ({"scheme": "swin", "depths": (1, 1)}, "the deepest layer of this model is .* depth 0, .* last one at 2"),
        (
            {"scheme": "vit", "num_layers": 2, "prefix": "net."},
            r"no parameter .*'vit' behind the prefix 'net.' \(there",
        ),
        ({"scheme": "vit", "num_layers": 1}, "the deepest layer of this model is blocks.1.weight at depth 2, but"),
        ({"scheme": "vit", "num_layers": 3}, "put the last one at 3; correct them"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_an_error_that_names_the_remedy(arguments, message):
    model = Named(["patch_embed.weight", "blocks.0.weight", "blocks.1.weight", "head.weight"])
    with pytest.raises(ValueError, match=message):
        build_layer_decay(model, **{"rate": 0.5, **arguments})


@pytest.mark.parametrize("depths", [(1, 2), (3,)], ids=str)
def test_depths_that_do_not_fit_the_blocks_are_an_error(depths):
    model = Named(["stages.0.blocks.0.weight", "stages.0.blocks.1.weight", "stages.1.blocks.0.weight"])
    with pytest.raises(ValueError, match=r"depths=\[.*\] has no place for stages"):
        build_layer_decay(model, 0.5, "swin", depths=depths)
