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
    for scheme in ("vit", "beit", "mae"):
        found = factors(names, 0.75, scheme, num_layers=12)
        assert found["cls_token"] == pytest.approx(0.023757, abs=1e-6)
        assert [found[name] for name in names[-3:]] == [0.5625, 0.75, 1.0]
    stages = [
        "downsample_layers.3.0.weight",
        *(f"stages.{s}.1.gamma" for s in range(4)),
        "head.weight",
    ]
    for num_layers, expected in {
        12: [0.2542, 0.2824, 0.3138, 0.3487, 0.3874, 1.0],
        6: [0.4783, 0.5314, 0.5905, 0.6561, 0.729, 1.0],
    }.items():
        found = factors(stages, 0.9, "convnext_stage_mmseg", num_layers=num_layers)
        assert [*found.values()] == pytest.approx(expected, abs=5e-5)


# (scheme, prefix of OpenMMLab, timm or Hugging Face) -> names at depth 0 | 1 | ...
NAMES = {
    (
        "vit",
        "backbone.",
    ): "cls_token pos_embed patch_embed.proj.b mask_token | layers.0.ln1.w | layers.1.ln1.w | ln1.w",
    (
        "vit",
        "",
    ): "cls_token reg_token dist_token register_tokens pos_embed patch_embed.proj.w norm_pre.w"
    " | blocks.0.attn.qkv.b | blocks.1.attn.qkv.b | norm.w",
    (
        "vit",
        "vit.",
    ): "embeddings.cls_token embeddings.proj.w | encoder.layer.0.w | encoder.layer.1.w | layernorm.w",
    ("swin", "backbone."): "mask_token absolute_pos_embed patch_embed.proj.w | stages.0.blocks.0.w"
    " | stages.0.blocks.1.w stages.0.downsample.norm.w | stages.1.blocks.0.w | norm3.w",
    ("swin", ""): "patch_embed.proj.w | layers.0.blocks.0.w"
    " | layers.0.blocks.1.w layers.1.downsample.norm.w | layers.1.blocks.0.w | norm.w",
    ("swin", "swin."): "embeddings.norm.w | encoder.layers.0.blocks.0.w"
    " | encoder.layers.0.blocks.1.w encoder.layers.0.downsample.norm.w | encoder.layers.1.blocks.0.w | layernorm.w",
    ("mixmim", ""): "patch_embed.proj.w absolute_pos_embed pos_embed | layers.0.blocks.0.w"
    " | layers.0.blocks.1.w layers.0.downsample.norm.w | layers.1.blocks.0.w norm.w",
    (
        "convnext",
        "backbone.",
    ): "downsample_layers.0.1.w | stages.0.2.w | downsample_layers.1.0.w stages.1.0.w"
    " | downsample_layers.2.0.w stages.2.2.w | stages.2.3.w | stages.2.8.w"
    " | downsample_layers.3.0.w stages.3.2.w | norm3.w",
    (
        "convnext",
        "",
    ): "stem.0.w stem.1.b | stages.0.blocks.2.w | stages.1.downsample.0.w stages.1.blocks.0.w"
    " | stages.2.downsample.0.w stages.2.blocks.2.w | stages.2.blocks.3.w | stages.2.blocks.8.w"
    " | stages.3.downsample.0.w stages.3.blocks.2.w | head.norm.w",
    ("convnext_stage", "backbone."): "downsample_layers.0.1.w downsample_layers.2.0.w"
    " | stages.0.2.w | stages.1.0.w | stages.2.8.w | stages.3.2.w | norm3.w",
    (
        "convnext_stage",
        "convnext.",
    ): "embeddings.layernorm.w encoder.stages.1.downsampling_layer.0.w"
    " | encoder.stages.0.layers.2.w | encoder.stages.1.layers.0.w | encoder.stages.2.layers.8.w"
    " | encoder.stages.3.layers.2.w | layernorm.w",
}
ARGUMENTS = {"vit": {"num_layers": 2}, "swin": {"depths": (2, 1)}, "convnext": {"num_layers": 6}}
ARGUMENTS |= {"mixmim": ARGUMENTS["swin"], "convnext_stage": {}}


@pytest.mark.parametrize(("scheme", "prefix"), NAMES)
def test_the_names_of_libraries_have_the_depths_of_their_scheme(scheme, prefix):
    by_depth = [names.split() for names in NAMES[scheme, prefix].split(" | ")]
    by_depth[-1].append("decode_head.w" if prefix else "head.w")  # without the prefix
    last = len(by_depth) - 1
    exponents = {
        name if "head" in name else prefix + name: last - depth
        for depth, names in enumerate(by_depth)
        for name in names
    }
    model = Named([*exponents])
    model.base_model_prefix = prefix.removesuffix(".")  # of Hugging Face
    factor_of = build_layer_decay(model, 0.75, scheme, **ARGUMENTS[scheme])
    assert {name: factor_of(name) for name in exponents} == powers(exponents, 0.75)


def test_by_name_mixmim_has_mmselfsups_extra_factor():
    names = NAMES["mixmim", ""].replace("|", "").split()
    plain, extra = (
        factors(names, 0.5, scheme, depths=(2, 1)) for scheme in ("mixmim", "mixmim_mmselfsup")
    )
    assert extra == {name: factor / 2 for name, factor in plain.items()}


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
    for scheme, expected in {
        "model": [0.25, 0.5, 1.0],
        "solver_test_depth": [0.5, 1.0, 1.0],
    }.items():
        factor_of = build_layer_decay(model, 0.5, scheme)
        assert [
            factor_of(name) for name in ("first.weight", "second.bias", "third.weight")
        ] == expected
    by_depth = build_layer_decay(model, 0.5, "model")
    rules = ParamRules(
        lr_factors={"bias": 2.0}, custom_keys={"first": {"lr_factor": 0.5}}, lr_factor_func=by_depth
    )
    groups = build_param_groups(model, 1.0, 0.1, rules)
    lrs = {param: group["lr"] for group in groups for param in group["params"]}
    assert [lrs[param] for param in model.parameters()] == [0.125, 0.25, 0.5, 1.0, 1.0, 2.0]
    # detectron2's argument
    groups = get_default_optimizer_params(model, 1.0, lr_factor_func=by_depth)
    assert [group["lr"] for group in groups] == [0.25, 0.5, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"scheme": "resnet"},
            "unknown scheme 'resnet'; accepted: vit, beit, .*, model .*, solver_test_depth",
        ),
        ({"scheme": "swin", "depths": ()}, r"'swin' needs depths \(DEPTHS\)"),
        (
            {"scheme": "swin", "depths": (1, 1)},
            r"depths=\[1, 1\] has no place for stages.0.blocks.1",
        ),
        (
            {"scheme": "solver_test_bad_depth"},
            r"the depth of patch_embed.weight must be in \[0, 2\), got 2",
        ),
        (
            {"scheme": "vit", "num_layers": 1},
            "last layer at 1, but the deepest one is blocks.1.weight at depth 2",
        ),
        ({"scheme": "vit", "num_layers": 3}, "put the last layer at 3"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_an_error(arguments, message):
    names = [
        "patch_embed.weight",
        "blocks.0.weight",
        "blocks.1.weight",
        "stages.0.blocks.1.w",
        "head.weight",
    ]
    with pytest.raises(ValueError, match=message):
        build_layer_decay(Named(names), 0.5, **arguments)


@pytest.mark.parametrize(
    ("scheme", "names", "refused"),
    [
        ("vit", ["tok_embed.w", "cls_token", "blocks.0.w", "head.w"], "tok_embed.w"),
        ("vit", ["embed_tokens.weight", "layers.0.w", "norm.w"], "embed_tokens.weight"),
        ("swin", ["rope_freqs", "layers.0.blocks.0.w", "norm.w"], "rope_freqs"),
        ("convnext_stage", ["tokenizer.w", "stages.3.blocks.0.w", "head.w"], "tokenizer.w"),
        ("vit", ["head.w", "patch_embed.w", "blocks.0.w"], "head.w"),
    ],
)
def test_a_parameter_before_the_first_block_is_no_rest(scheme, names, refused):
    arguments = {"vit": {"num_layers": 1}, "swin": {"depths": (1,)}, "convnext_stage": {}}[scheme]
    with pytest.raises(ValueError, match=f"would give the rate of the last layer to {refused}, "):
        build_layer_decay(Named(names), 0.5, scheme, **arguments)


def test_the_rest_is_named_in_the_log_and_may_come_first_outside_the_backbone(caplog):
    caplog.set_level("INFO")
    names = ["decode_head.w", "backbone.patch_embed.w", "backbone.layers.0.w", "backbone.ln1.w"]
    found = factors(names, 0.5, "vit", num_layers=1)
    assert [*found.values()] == [1.0, 0.25, 0.5, 1.0]
    [text] = caplog.messages
    assert text.startswith("Layer decay 'vit': 2 parameters")
    assert "depth 2 of 2" in text
    assert text.endswith(": decode_head.w, backbone.ln1.w")


def test_a_shared_parameter_has_the_depth_of_its_first_layer():
    model = Named(["head.weight", "embeddings.w", "layer.0.w", "z.w"])
    model.embeddings.word = model.head.weight
    factor_of = build_layer_decay(model, 0.5, "vit", num_layers=1)
    assert factor_of("head.weight") == 0.25
    assert factor_of("layer.0.w") == 0.5
    assert factor_of("z.w") == 1.0
