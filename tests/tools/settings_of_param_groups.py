"""Which parameters are trained, and at what learning rate and weight decay."""

from collections.abc import Callable
from itertools import takewhile
from typing import Any

from tests.tools.digits_run import Run
from tests.tools.settings import EVERY_KIND, IMPORTS, QUICK, Setting, all_of, last_weights


def groups(*expected: tuple[str, float, float]) -> Callable[[Run], None]:
    """The parameter groups: names from the log, learning rate and weight decay from the checkpoint."""

    def effect(run: Run) -> None:
        table = run.log.split("Parameter groups:\n")[-1]  # the one of the newest trainer
        rows = [*takewhile(lambda line: line.startswith("|"), table.splitlines())][2:]
        rates = [(round(group["lr"], 9), round(group["weight_decay"], 9)) for group in run.param_groups()]
        assert len(rows) == len(rates)
        names = [row.split("|")[-2].strip() for row in rows]
        assert [(name, *pair) for name, pair in zip(names, rates, strict=True)] == list(expected)

    return effect


def options_of_groups(key: str, *expected: Any) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        assert [group.get(key) for group in run.param_groups()] == list(expected)

    return effect


def frozen_weights_stay(run: Run) -> None:
    before, after = last_weights(run)
    assert [name for name in after if before[name].equal(after[name])] == ["dwconv.weight", "dwconv.bias"]
    assert len(after) == 10
    assert sum(len(group["params"]) for group in run.param_groups()) == 8


def shared_weights_stay_equal(run: Run) -> None:
    model = run.checkpoint()["model"]
    assert model["dwconv.weight"].equal(model["dwconv2.weight"])
    assert len(model) == 10
    assert sum(len(group["params"]) for group in run.param_groups()) == 9


def of(key: str, value: Any) -> list[Any]:
    return [f"SOLVER.PARAM_GROUPS.{key}", value]


def custom_keys(*entries: dict[str, Any]) -> list[Any]:
    return of("CUSTOM_KEYS", [*entries])


def layers(*names: str) -> list[Any]:
    """A model with layers of these names."""
    return [*QUICK, *IMPORTS, "MODEL.NAME", "DigitsOfNamedLayers", "MODEL.LAYERS", names]


def layer_decay(scheme: str, **options: Any) -> list[Any]:
    options = {"RATE": 0.5, "SCHEME": scheme, **options}
    return [item for key, value in options.items() for item in of(f"LAYER_DECAY.{key}", value)]


# of the digits' own network: what is no norm, the norms, and the last layer
REST, NORMS, HEAD = (
    "layers.0.weight, ...",
    "layers.1.weight, ...",
    "layers.15.weight, ...",
)
NORM_WEIGHTS, BIASES = "layers.1.weight, ...", "layers.1.bias, ..."
DWCONVS = "dwconv.weight, ..."

FACTORS = [
    Setting("weight decay", ["SOLVER.WEIGHT_DECAY", 1e-2], groups((REST, 0.1, 1e-2), (NORMS, 0.1, 0.0)), QUICK),
    Setting(
        "weight decay of norms",
        ["SOLVER.WEIGHT_DECAY_NORM", 1e-4],
        groups((REST, 0.1, 1e-3), (NORMS, 0.1, 1e-4)),
        QUICK,
    ),
    Setting(
        "weight decay of biases",
        ["SOLVER.WEIGHT_DECAY_BIAS", 1e-4],
        groups((REST, 0.1, 1e-3), (NORM_WEIGHTS, 0.1, 0.0), (BIASES, 0.1, 1e-4)),
        QUICK,
    ),
    Setting(
        "learning rate of biases, as in detectron2",
        ["SOLVER.BIAS_LR_FACTOR", 2.0],
        groups(
            (REST, 0.1, 1e-3),
            (NORM_WEIGHTS, 0.1, 0.0),
            ("layers.1.bias, ...", 0.2, 0.0),
            ("layers.15.bias", 0.2, 1e-3),
        ),
        QUICK,
    ),
    Setting("factor of norms", of("NORM_LR_FACTOR", 0.5), groups((REST, 0.1, 1e-3), (NORMS, 0.05, 0.0)), QUICK),
    Setting(
        "decay factor of norms",
        of("NORM_DECAY_FACTOR", 0.5),
        groups(("layers.0.weight, ...", 0.1, 1e-3), (NORMS, 0.1, 5e-4)),
        [*QUICK, "SOLVER.WEIGHT_DECAY_NORM", 1e-3],
    ),
    Setting(
        "factor of biases",
        of("BIAS_LR_FACTOR", 0.5),
        groups((REST, 0.1, 1e-3), (NORMS, 0.1, 0.0), ("layers.15.bias", 0.05, 1e-3)),
        QUICK,
    ),
    Setting(
        "decay factor of biases",
        of("BIAS_DECAY_FACTOR", 0.5),
        groups((REST, 0.1, 1e-3), (NORMS, 0.1, 0.0), ("layers.15.bias", 0.1, 5e-4)),
        QUICK,
    ),
    Setting(
        "factor of depth-wise convolutions",
        of("DWCONV_LR_FACTOR", 0.5),
        groups(("scale, ...", 0.1, 1e-3), (DWCONVS, 0.05, 1e-3), ("norm.weight, ...", 0.1, 0.0)),
        EVERY_KIND,
    ),
    Setting(
        "decay factor of depth-wise convolutions",
        of("DWCONV_DECAY_FACTOR", 0.5),
        groups(("scale, ...", 0.1, 1e-3), (DWCONVS, 0.1, 5e-4), ("norm.weight, ...", 0.1, 0.0)),
        EVERY_KIND,
    ),
    Setting(
        "factor of embeddings",
        of("EMBEDDING_LR_FACTOR", 0.5),
        groups(
            ("scale, ...", 0.1, 1e-3),
            ("embedding.weight", 0.05, 1e-3),
            ("norm.weight, ...", 0.1, 0.0),
        ),
        EVERY_KIND,
    ),
    Setting(
        "decay factor of embeddings",
        of("EMBEDDING_DECAY_FACTOR", 0.5),
        groups(
            ("scale, ...", 0.1, 1e-3),
            ("embedding.weight", 0.1, 5e-4),
            ("norm.weight, ...", 0.1, 0.0),
        ),
        EVERY_KIND,
    ),
    Setting(
        "factor of what is flat",
        of("FLAT_LR_FACTOR", 0.5),
        groups(
            ("scale, ...", 0.05, 1e-3),
            ("embedding.weight, ...", 0.1, 1e-3),
            ("norm.weight, ...", 0.05, 0.0),
        ),
        EVERY_KIND,
    ),
    Setting(
        "decay factor of what is flat",
        of("FLAT_DECAY_FACTOR", 0.5),
        groups(
            ("scale, ...", 0.1, 5e-4),
            ("embedding.weight, ...", 0.1, 1e-3),
            ("norm.weight, ...", 0.1, 0.0),
        ),
        EVERY_KIND,
    ),
]

# "layers.1" is a part of layers.10 and layers.11 as well
TWO_KEYS = custom_keys({"KEY": "layers.1", "LR_FACTOR": 0.5}, {"KEY": "layers.15", "LR_FACTOR": 0.1})
NORM_KEY = custom_keys({"KEY": "layers.11", "LR_FACTOR": 0.5})
CUSTOM_KEYS = [
    Setting(
        "custom keys, of which the longest counts",
        TWO_KEYS,
        groups(
            (REST, 0.1, 1e-3),
            (NORMS, 0.05, 0.0),
            ("layers.4.weight, ...", 0.1, 0.0),
            ("layers.10.weight", 0.05, 1e-3),
            (HEAD, 0.01, 1e-3),
        ),
        QUICK,
    ),
    Setting(
        "custom keys, of which the shortest counts",
        of("KEY_MATCH", "shortest"),
        groups(
            (REST, 0.1, 1e-3),
            (NORMS, 0.05, 0.0),
            ("layers.4.weight, ...", 0.1, 0.0),
            ("layers.10.weight, ...", 0.05, 1e-3),
        ),
        [*QUICK, *TWO_KEYS],
    ),
    Setting(
        "custom keys that are whole names",
        of("KEY_MATCH", "exact"),
        groups((REST, 0.1, 1e-3), (NORMS, 0.1, 0.0), ("layers.15.weight", 0.01, 1e-3)),
        [*QUICK, *custom_keys({"KEY": "layers.1", "LR_FACTOR": 0.5}, {"KEY": "layers.15.weight", "LR_FACTOR": 0.1})],
    ),
    Setting(
        "custom keys that switch other rules off",
        of("CUSTOM_KEYS_ONLY", True),
        groups((REST, 0.1, 1e-3), (NORMS, 0.1, 0.0), ("layers.11.weight, ...", 0.05, 1e-3)),
        [*QUICK, *NORM_KEY],
    ),
    Setting(
        "decay factor of a custom key",
        custom_keys({"KEY": "layers.15", "DECAY_FACTOR": 0.5}),
        groups((REST, 0.1, 1e-3), (NORMS, 0.1, 0.0), (HEAD, 0.1, 5e-4)),
        QUICK,
    ),
    Setting(
        "a learning rate without schedule",
        custom_keys({"KEY": "layers.15", "FIXED_LR": True}),
        groups((REST, 0.001, 1e-3), (NORMS, 0.001, 0.0), (HEAD, 0.1, 1e-3)),
        [*QUICK, "SOLVER.STEPS", [6, 9]],
    ),
    Setting(
        "an optimizer's option in a custom key",
        custom_keys({"KEY": "layers.15", "MOMENTUM": 0.5}),
        all_of(
            groups((REST, 0.1, 1e-3), (NORMS, 0.1, 0.0), (HEAD, 0.1, 1e-3)),
            options_of_groups("momentum", 0.9, 0.9, 0.5),
        ),
        QUICK,
    ),
]

VIT = ("patch_embed.projection", "layers.0.ffn", "layers.1.ffn", "head")
SWIN = (
    *("patch_embed.projection", "stages.0.blocks.0.ffn", "stages.0.downsample.reduction"),
    *("stages.1.blocks.0.ffn", "stages.1.blocks.1.ffn", "head"),
)
CONVNEXT = ("downsample_layers.0.0", "stages.0.0.mlp", "stages.1.0.mlp", "stages.2.3.mlp", "stages.3.0.mlp", "head")
SWIN_STAGE_0 = "stages.0.blocks.0.ffn.weight, ..."


def rates(names: tuple[str, ...], *lrs: float) -> Callable[[Run], None]:
    """One group for each layer."""
    return groups(*((f"{name}.weight", lr, 1e-3) for name, lr in zip(names, lrs, strict=True)))


LAYER_DECAY = [
    *(
        Setting(
            f"layer decay, {scheme}",
            layer_decay(scheme, NUM_LAYERS=2),
            rates(VIT, 0.0125, 0.025, 0.05, 0.1),
            layers(*VIT),
        )
        for scheme in ("vit", "beit", "mae")
    ),
    Setting(
        "layer decay behind a prefix",
        layer_decay("vit", NUM_LAYERS=2, PREFIX="encoder."),
        groups(
            ("encoder.layers.0.ffn.weight", 0.025, 1e-3),
            ("encoder.layers.1.ffn.weight", 0.05, 1e-3),
            ("decoder.layers.0.ffn.weight", 0.1, 1e-3),
        ),
        layers("encoder.layers.0.ffn", "encoder.layers.1.ffn", "decoder.layers.0.ffn"),
    ),
    Setting(
        "layer decay, swin",
        layer_decay("swin", DEPTHS=(1, 2)),
        groups(
            ("patch_embed.projection.weight", 0.00625, 1e-3),
            (SWIN_STAGE_0, 0.0125, 1e-3),
            ("stages.1.blocks.0.ffn.weight", 0.025, 1e-3),
            ("stages.1.blocks.1.ffn.weight", 0.05, 1e-3),
            ("head.weight", 0.1, 1e-3),
        ),
        layers(*SWIN),
    ),
    *(
        Setting(
            f"layer decay, {scheme}",
            layer_decay(scheme, DEPTHS=(1, 2)),
            groups(
                ("patch_embed.projection.weight", 0.0125 * extra, 1e-3),
                (SWIN_STAGE_0, 0.025 * extra, 1e-3),
                ("stages.1.blocks.0.ffn.weight", 0.05 * extra, 1e-3),
                ("stages.1.blocks.1.ffn.weight, ...", 0.1 * extra, 1e-3),
            ),
            layers(*SWIN),
        )
        for scheme, extra in (("mixmim", 1.0), ("mixmim_mmselfsup", 0.5))
    ),
    Setting(
        "layer decay, convnext",
        layer_decay("convnext", NUM_LAYERS=6),
        rates(CONVNEXT, 0.00078125, 0.0015625, 0.003125, 0.0125, 0.05, 0.1),
        layers(*CONVNEXT),
    ),
    Setting(
        "layer decay, convnext_stage",
        layer_decay("convnext_stage"),
        rates(CONVNEXT, 0.003125, 0.00625, 0.0125, 0.025, 0.05, 0.1),
        layers(*CONVNEXT),
    ),
    Setting(
        "layer decay, convnext_stage_mmseg",
        layer_decay("convnext_stage_mmseg", NUM_LAYERS=6),
        rates(CONVNEXT, 0.00078125, 0.0015625, 0.003125, 0.00625, 0.0125, 0.1),
        layers(*CONVNEXT),
    ),
    Setting(
        "layer decay by the model's get_layer_depth",
        layer_decay("model"),
        groups(
            ("scale", 0.05, 1e-3),
            ("embedding.weight", 0.003125, 1e-3),
            ("dwconv.weight, ...", 0.00625, 1e-3),
            ("dwconv2.weight, ...", 0.0125, 1e-3),
            ("norm.weight, ...", 0.025, 0.0),
            ("head.weight, ...", 0.1, 1e-3),
        ),
        EVERY_KIND,
    ),
    Setting(
        "layer decay by a registered function",
        layer_decay("head_last"),
        groups((REST, 0.05, 1e-3), (NORMS, 0.05, 0.0), (HEAD, 0.1, 1e-3)),
        [*QUICK, *IMPORTS],
    ),
]

PARAM_GROUPS = [
    *FACTORS,
    *CUSTOM_KEYS,
    *LAYER_DECAY,
    Setting(
        "groups by a registered function",
        of("BUILDER", "head_apart"),
        groups(("layers.0.weight, ...", 0.1, 1e-3), (HEAD, 1.0, 1e-3)),
        [*QUICK, *IMPORTS],
    ),
    Setting("frozen parameters", ["MODEL.FROZEN", ["dwconv.weight", "dwconv.bias"]], frozen_weights_stay, EVERY_KIND),
    Setting("shared parameters", ["MODEL.SHARED", True], shared_weights_stay_equal, EVERY_KIND),
]
