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


def test_the_printed_factors_of_vit():
    names = ["cls_token", *(f"layers.{b}.attn.qkv.weight" for b in range(12)), "ln1.weight"]
    found = factors(names, 0.75, "vit", num_layers=12)
    assert found["cls_token"] == pytest.approx(0.023757, abs=1e-6)
    assert [found[name] for name in names[-3:]] == [0.5625, 0.75, 1.0]


def test_the_stages_of_convnext_have_a_layer_each():
    stages = ["mask_token", "downsample_layers.3.0.weight", *(f"stages.{s}.1.gamma" for s in range(4)), "head.weight"]
    found = factors(stages, 0.9, "convnext_stage")
    assert [*found.values()] == pytest.approx([0.59049, 0.59049, 0.6561, 0.729, 0.81, 0.9, 1.0])


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


@pytest.mark.parametrize(("scheme", "expected"), [("model", [0.25, 0.5, 1.0]), ("solver_test_depth", [0.5, 1.0, 1.0])])
def test_a_users_model_or_a_registered_function_says_the_depth_of_a_name(scheme, expected):
    factor_of = build_layer_decay(Pyramid(), 0.5, scheme)
    assert [factor_of(name) for name in ("first.weight", "second.bias", "third.weight")] == expected


def test_the_factor_of_the_depth_multiplies_those_of_other_rules():
    model = Pyramid()
    rules = ParamRules(
        lr_factors={"bias": 2.0},
        custom_keys={"first": {"lr_factor": 0.5}},
        lr_factor_func=(by_depth := build_layer_decay(model, 0.5, "model")),
    )
    groups = build_param_groups(model, 1.0, 0.1, rules)
    lrs = {param: group["lr"] for group in groups for param in group["params"]}
    assert [lrs[param] for param in model.parameters()] == [0.125, 0.25, 0.5, 1.0, 1.0, 2.0]
    groups = get_default_optimizer_params(model, 1.0, lr_factor_func=by_depth)  # detectron2's argument
    assert [group["lr"] for group in groups] == [0.25, 0.5, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 0.0, "scheme": "vit"}, r"rate must be in \(0, 1\], got 0.0"),
        ({"scheme": "resnet"}, "unknown scheme 'resnet'; accepted: vit, beit, .*, model, .*solver_test_depth"),
        ({"scheme": "vit"}, r"'vit' needs num_layers \(NUM_LAYERS\)"),
        ({"scheme": "swin", "depths": ()}, r"'swin' needs depths \(DEPTHS\)"),
        ({"scheme": "solver_test_bad_depth"}, r"the depth of patch_embed.weight must be in \[0, 2\), got 2"),
        ({"scheme": "vit", "num_layers": 2, "prefix": "net."}, "no parameter .* after the prefix 'net.': patch"),
        ({"scheme": "vit", "num_layers": 1}, "last layer at 1, but the deepest one is blocks.1.weight at depth 2"),
        ({"scheme": "vit", "num_layers": 3}, "put the last layer at 3"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_an_error(arguments, message):
    model = Named(["patch_embed.weight", "blocks.0.weight", "blocks.1.weight", "head.weight"])
    with pytest.raises(ValueError, match=message):
        build_layer_decay(model, **{"rate": 0.5, **arguments})
    stages = Named(["stages.0.blocks.0.weight", "stages.0.blocks.1.weight", "stages.1.blocks.0.weight"])
    with pytest.raises(ValueError, match=r"depths=\[.*\] has no place for stages"):
        build_layer_decay(stages, 0.5, "swin", depths=(1, 2))


# ---------------------------------------------------------------------- all parameters of whole models

LAYER = ["norm1.weight", "attn.qkv.bias", "mlp.fc2.weight"]
LAYER_HF = ["attention.attention.query.weight", "layernorm_after.bias"]
BLOCK_CONVNEXT = ["gamma", "dwconv.w", "pwconv2.b"]


def both(name):
    return [f"{name}.weight", f"{name}.bias"]


def table(*rows):
    """Pairs of a depth and names as name -> depth."""
    return {name: depth for depth, names in rows for name in names}


def vit_of(stem, block, leaves, rest, count=12):
    return table(
        (0, stem), *((b + 1, [f"{block}.{b}.{leaf}" for leaf in leaves]) for b in range(count)), ("rest", rest)
    )


def staged(stem, stage, leaves, downsampling, rest, depths=(2, 2, 6, 2), *, at_start=False, block="blocks"):
    rows, done = [(0, stem)], 0
    for s, depth in enumerate(depths):
        owner = s + 1 if at_start else s  # of the downsampling after stage s
        if s + 1 < len(depths):
            rows.append((done + depth, [f"{stage}.{owner}.{name}" for name in downsampling]))
        rows += [(done + b + 1, [f"{stage}.{s}.{block}.{b}.{leaf}" for leaf in leaves]) for b in range(depth)]
        done += depth
    return table(*rows, ("rest", rest))


def convnext_of(stem, downsampling, block, rest, num_layers, depths, stage_wise):
    """``downsampling`` and ``block`` give a prefix for a stage, and for a stage and block."""
    rows = [(0, stem)]
    for s, depth in enumerate(depths):
        before = [0, 2, 3, num_layers][s]
        if s:
            rows.append((0 if stage_wise else before, [f"{downsampling(s)}.{i}.{leaf}" for i in "01" for leaf in "wb"]))
        for b in range(depth):
            layer_wise = [1, 2, 3 + b // 3, num_layers][s]
            rows.append((s + 1 if stage_wise else layer_wise, [f"{block(s, b)}.{leaf}" for leaf in BLOCK_CONVNEXT]))
    return table(*rows, ("rest", rest))


MM = ["cls_token", "pos_embed", *both("patch_embed.projection")]
VITS = {
    "OpenMMLab": ("backbone.", vit_of([*MM, "mask_token"], "layers", LAYER, both("ln1")), both("head.fc")),
    "timm": (
        "",
        vit_of(["cls_token", "pos_embed", *both("patch_embed.proj")], "blocks", LAYER, both("norm")),
        both("head"),
    ),
    "Hugging Face": (
        "vit.",
        vit_of(
            [
                f"embeddings.{name}"
                for name in ("cls_token", "position_embeddings", *both("patch_embeddings.projection"))
            ],
            "encoder.layer",
            LAYER_HF,
            both("layernorm"),
        ),
        both("classifier"),
    ),
}
DOWN = [*both("downsample.norm"), "downsample.reduction.weight"]
SWINS = {
    "OpenMMLab": (
        "backbone.",
        staged(
            ["mask_token", *both("patch_embed.projection")],
            "stages",
            LAYER,
            DOWN,
            [*both("norm3"), "absolute_pos_embed"],
        ),
        both("head.fc"),
    ),
    "timm": ("", staged(both("patch_embed.proj"), "layers", LAYER, DOWN, both("norm"), at_start=True), both("head.fc")),
    "Hugging Face": (
        "swin.",
        staged(
            [*both("embeddings.patch_embeddings.projection"), *both("embeddings.norm")],
            "encoder.layers",
            LAYER_HF,
            DOWN,
            both("layernorm"),
        ),
        both("classifier"),
    ),
}
CONVNEXTS = {
    "OpenMMLab": (
        "backbone.",
        lambda *rule: convnext_of(
            [*both("downsample_layers.0.0"), *both("downsample_layers.0.1")],
            lambda s: f"downsample_layers.{s}",
            lambda s, b: f"stages.{s}.{b}",
            both("norm3"),
            *rule,
        ),
        both("decode_head.conv_seg"),
    ),
    "timm": (
        "",
        lambda *rule: convnext_of(
            [*both("stem.0"), *both("stem.1")],
            lambda s: f"stages.{s}.downsample",
            lambda s, b: f"stages.{s}.blocks.{b}",
            both("head.norm"),
            *rule,
        ),
        both("head.fc"),
    ),
    "Hugging Face": (
        "convnext.",
        lambda *rule: convnext_of(
            [*both("embeddings.patch_embeddings"), *both("embeddings.layernorm")],
            lambda s: f"encoder.stages.{s}.downsampling_layer",
            lambda s, b: f"encoder.stages.{s}.layers.{b}",
            both("layernorm"),
            *rule,
        ),
        both("classifier"),
    ),
}


def check_all(prefix, table, head, last, rest, scheme, **arguments):
    """Every factor is ``rate ** (last - depth)``, of every parameter."""
    exponents = {prefix + name: last - (rest if depth == "rest" else depth) for name, depth in table.items()}
    exponents |= dict.fromkeys(head, last - rest)
    model = Named(list(exponents))
    model.base_model_prefix = prefix.removesuffix(".")  # of Hugging Face
    factor_of = build_layer_decay(model, 0.75, scheme, **arguments)
    assert {name: factor_of(name) for name, _ in model.named_parameters()} == powers(exponents, 0.75)


@pytest.mark.parametrize("scheme", ["vit", "beit", "mae"])
@pytest.mark.parametrize("library", VITS)
def test_all_parameters_of_a_vit_have_the_factor_of_the_formula(library, scheme):
    check_all(*VITS[library], 13, 13, scheme, num_layers=12)


@pytest.mark.parametrize("library", SWINS)
def test_all_parameters_of_a_swin_have_the_factor_of_the_formula(library):
    check_all(*SWINS[library], 13, 13, "swin", depths=(2, 2, 6, 2))


@pytest.mark.parametrize(("num_layers", "blocks"), [(6, (3, 3, 9, 3)), (12, (3, 3, 27, 3))])
@pytest.mark.parametrize("library", CONVNEXTS)
def test_all_parameters_of_a_convnext_have_the_factor_of_the_formula(library, num_layers, blocks):
    prefix, depths_of, head = CONVNEXTS[library]
    last = num_layers + 1
    check_all(prefix, depths_of(num_layers, blocks, False), head, last, last, "convnext", num_layers=num_layers)
    check_all(prefix, depths_of(num_layers, blocks, True), head, 5, 5, "convnext_stage")
