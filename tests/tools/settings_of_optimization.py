"""Parameter groups, schedules, optimizers, clipping, accumulation, precision."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.tools.digits_run import MAX_ITER, Run
from tests.tools.settings import EVERY_KIND, IMPORTS, QUICK, Setting, all_of, last_weights, logs, metric_at, metric_is
from tests.tools.settings_of_param_groups import PARAM_GROUPS, custom_keys, options_of_groups
from tests.tools.settings_of_schedules import SCHEDULES, values

LR = 0.1
# base of settings by which an update, LR times the gradient, is changed
BARE = [*QUICK, "SOLVER.MOMENTUM", 0.0, "SOLVER.NESTEROV", False, "SOLVER.WEIGHT_DECAY", 0.0]


def last_updates(run: Run) -> dict[str, Tensor]:
    """name -> by how much the last iteration has lowered a parameter."""
    before, after = last_weights(run)
    return {name: before[name] - after[name] for name in before if name.endswith(("weight", "bias"))}


def norms(weights: dict[str, Tensor], norm_type: float = 2.0) -> list[float]:
    return [weight.norm(norm_type).item() for weight in weights.values()]


def about(value: Any) -> Any:
    return pytest.approx(value, rel=1e-3)


def every_group(**options: Any) -> Callable[[Run], None]:
    """What every parameter group in the checkpoint says."""

    def effect(run: Run) -> None:
        assert all({key: group[key] for key in options} == options for group in run.param_groups())

    return effect


def states(*names: str) -> Callable[[Run], None]:
    """What the optimizer remembers of every parameter in the checkpoint."""
    return states_of_some(names)


def states_of_some(*kinds: tuple[str, ...]) -> Callable[[Run], None]:
    """What several optimizers remember of their parameters."""

    def effect(run: Run) -> None:
        saved = run.checkpoint()["trainer"]["_trainer"]["optimizer"]["state"].values()
        assert {tuple(sorted(state)) for state in saved} == {*kinds}

    return effect


# ---------------------------------------------------------------------------- optimizers


NO_NESTEROV = ["SOLVER.NESTEROV", False]  # the config of the digits sets it, and not all take it


def of_optimizer(name: str, **arguments: Any) -> list[Any]:
    arguments = {"NAME": name, **arguments}
    return NO_NESTEROV + [item for key, value in arguments.items() for item in (f"SOLVER.OPTIMIZER.{key}", value)]


def updates_follow_the_weights(*excluded: str) -> Callable[[Run], None]:
    """Without weight decay, the norm of an update by LARS is that of the weights times the rate and eta, here 0.02."""

    def effect(run: Run) -> None:
        updates, (before, _) = last_updates(run), last_weights(run)
        following = [
            name for name in updates if updates[name].norm().item() == about(LR * 0.02 * before[name].norm().item())
        ]
        assert following == [name for name in updates if not name.startswith(excluded or "none")]

    return effect


def the_last_update_is_the_momentum(run: Run) -> None:
    saved = run.checkpoint()["trainer"]["_trainer"]["optimizer"]["state"].values()
    assert sorted(state["momentum_buffer"].norm().item() for state in saved) == about(sorted(norms(last_updates(run))))


def every_value_changes_by_the_rate(run: Run) -> None:
    assert norms(last_updates(run), float("inf")) == about([LR] * 14)


LARS = [*BARE, *of_optimizer("LARS", ETA=0.02)]
OPTIMIZERS = [
    Setting("base learning rate", ["SOLVER.BASE_LR", 0.05], metric_is("lr", {0: 0.05, 11: 0.05}), QUICK),
    Setting("momentum", ["SOLVER.MOMENTUM", 0.5], every_group(momentum=0.5), QUICK),
    Setting("logical ranks", ["SOLVER.LOGICAL_RANKS", 4], logs("4 logical ranks"), QUICK),
    Setting("no Nesterov momentum", ["SOLVER.NESTEROV", False], every_group(nesterov=False), QUICK),
    Setting(
        "rate and decay of the optimizer itself",
        ["SOLVER.OPTIMIZER.LR", 0.05, "SOLVER.OPTIMIZER.WEIGHT_DECAY", 0.02],
        all_of(metric_is("lr", {0: 0.05, 11: 0.05}), options_of_groups("weight_decay", 0.02, 0.0)),
        QUICK,
    ),
    Setting(
        "an argument of SGD",
        ["SOLVER.OPTIMIZER.DAMPENING", 0.5, "SOLVER.NESTEROV", False],
        every_group(dampening=0.5),
        QUICK,
    ),
    Setting(
        "the foreach form", ["SOLVER.OPTIMIZER.FOREACH", True], logs("Optimizer SGD, implementation: foreach"), QUICK
    ),
    Setting("no fused form", ["SOLVER.OPTIMIZER.FUSED", False], logs("Optimizer SGD, implementation: default"), QUICK),
    Setting(
        "AdamW",
        of_optimizer("AdamW", BETAS=[0.8, 0.99], EPS=1e-6, AMSGRAD=True),
        all_of(
            every_group(betas=(0.8, 0.99), eps=1e-6, amsgrad=True),
            states("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
        ),
        QUICK,
    ),
    Setting(
        "RMSprop",
        of_optimizer("RMSprop", ALPHA=0.9, CENTERED=True),
        all_of(every_group(alpha=0.9, centered=True), states("grad_avg", "momentum_buffer", "square_avg", "step")),
        QUICK,
    ),
    Setting(
        "Muon beside AdamW",
        [*NO_NESTEROV, "SOLVER.OPTIMIZERS", [{"NAME": "Muon", "PARAMS": ["*.15.weight"]}, {"NAME": "AdamW"}]],
        states_of_some(("momentum_buffer",), ("exp_avg", "exp_avg_sq", "step")),
        QUICK,
    ),
    Setting("a user's optimizer", of_optimizer("SignSGD"), every_value_changes_by_the_rate, [*BARE, *IMPORTS]),
    Setting("LARS", of_optimizer("LARS", ETA=0.02), updates_follow_the_weights(), BARE),
    Setting(
        "LARS with momentum",
        of_optimizer("LARS", ETA=0.02, MOMENTUM=0.9),
        all_of(states("momentum_buffer"), the_last_update_is_the_momentum),
        BARE,
    ),
    Setting(
        "what LARS excludes",
        custom_keys({"KEY": "layers.15", "LARS_EXCLUDE": True}),
        all_of(updates_follow_the_weights("layers.15."), options_of_groups("lars_exclude", False, True)),
        LARS,
    ),
]

# ---------------------------------------------------------------------------- the step


def clip(kind: str, value: float, **options: Any) -> list[Any]:
    options = {"ENABLED": True, "CLIP_TYPE": kind, "CLIP_VALUE": value, **options}
    return [item for key, value in options.items() for item in (f"SOLVER.CLIP_GRADIENTS.{key}", value)]


def every_gradient_has_at_most(norm: float) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        found = norms(last_updates(run))
        assert max(found) == about(LR * norm)
        assert found.count(about(LR * norm)) > 3

    return effect


def all_gradients_together_have(norm: float, norm_type: float = 2.0) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        total = sum(each**norm_type for each in norms(last_updates(run), norm_type)) ** (1 / norm_type)
        assert total == about(LR * norm)

    return effect


def no_value_is_above(value: float) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        assert max(norms(last_updates(run), float("inf"))) == about(LR * value)

    return effect


def batches_in_all(number: int) -> Callable[[Run], None]:
    """The micro-batches of all iterations."""

    def effect(run: Run) -> None:
        assert run.checkpoint()["model"]["layers.1.num_batches_tracked"] == number
        assert [*run.metric("lr")] == [*range(MAX_ITER)]

    return effect


def weights_are_float32(run: Run) -> None:
    assert {str(value.dtype) for value in run.checkpoint()["model"].values()} == {"torch.float32"}


def saved_scale(scale: float | None) -> Callable[[Run], None]:
    def effect(run: Run) -> None:
        assert run.checkpoint()["trainer"]["_trainer"]["grad_scaler"].get("scale") == scale

    return effect


CLIPPED = metric_at("grad_norm", [*range(MAX_ITER)])
AMP = ["SOLVER.AMP.ENABLED", True]
SCALE, SKIPPED = "[metric]grad_scaler", "skipped_updates"
STEPS = [
    Setting("clipping by value", clip("value", 0.003), all_of(no_value_is_above(0.003), CLIPPED), BARE),
    Setting(
        "clipping of each parameter",
        clip("norm", 0.02),
        all_of(every_gradient_has_at_most(0.02), CLIPPED),
        BARE,
    ),
    Setting(
        "clipping of the whole model",
        clip("full_model", 0.05),
        all_of(all_gradients_together_have(0.05), CLIPPED),
        BARE,
    ),
    Setting(
        "clipping by another norm",
        clip("full_model", 1.0, NORM_TYPE=1.0),
        all_of(all_gradients_together_have(1.0, 1.0), CLIPPED),
        BARE,
    ),
    Setting(
        "accumulation",
        ["SOLVER.ACCUMULATION_STEPS", 2],
        batches_in_all(2 * MAX_ITER),
        QUICK,
    ),
    Setting(
        "accumulation that grows",
        ["SOLVER.ACCUMULATION_FACTORS", [[6, 2]]],
        batches_in_all(6 + 2 * (MAX_ITER - 6)),
        QUICK,
    ),
    Setting(
        "short epochs",
        ["SOLVER.MAX_BATCHES_PER_EPOCH", 2, "SOLVER.CHECKPOINT_PERIOD", "3ep"],
        lambda run: run.checkpoint("model_0000005"),
        QUICK,
    ),
    Setting(
        "gradients are let go before the forward pass",
        ["SOLVER.ZERO_GRAD_BEFORE_FORWARD", True],
        values("has_gradients", lambda t: 0.0),
        EVERY_KIND,
    ),
    Setting(
        "float16",
        AMP,
        all_of(
            values("eps", lambda t: 2.0**-10),
            values(SCALE, lambda t: 65536.0),
            values(SKIPPED, lambda t: 0.0),
            weights_are_float32,
        ),
        EVERY_KIND,
    ),
    Setting(
        "float16 that overflows",
        ["SOLVER.AMP.INIT_SCALE", 2.0**100],
        all_of(
            values(SCALE, lambda t: 2.0 ** (100 - t)),
            values(SKIPPED, lambda t: t + 1),
            saved_scale(2.0 ** (100 - MAX_ITER)),
        ),
        [*QUICK, *AMP],
    ),
    Setting(
        "float16 of a fixed scale",
        ["SOLVER.AMP.LOSS_SCALE", 128.0],
        all_of(values(SCALE, lambda t: 128.0), saved_scale(None)),
        [*QUICK, *AMP],
    ),
    Setting(
        "skipped updates are counted",
        ["SOLVER.NON_FINITE.POLICY", "skip"],
        values(SKIPPED, lambda t: 0.0),
        [*QUICK, "SOLVER.NON_FINITE.MAX_IN_ROW", 5],
    ),
    Setting(
        "bfloat16",
        [*AMP, "SOLVER.AMP.PRECISION", "bfloat16"],
        all_of(values("eps", lambda t: 2.0**-7), saved_scale(None), weights_are_float32),
        EVERY_KIND,
    ),
    Setting(
        "a graph, for which a model on a CPU is compiled",
        ["SOLVER.GRAPH.ENABLED", True],
        values("compiled", lambda t: 1.0),
        [*QUICK, *IMPORTS, "MODEL.NAME", "DigitsOfNamedLayers", "MODEL.LAYERS", ["first", "last"]],
    ),
    Setting(
        "another number of workers",
        ["SOLVER.REFERENCE_WORLD_SIZE", 2, "SOLVER.MAX_ITER", 6, "SOLVER.CHECKPOINT_PERIOD", 3],
        all_of(values("lr", lambda t: 0.05), lambda run: run.checkpoint("model_0000005")),
        QUICK,
    ),
    Setting("another batch size", ["SOLVER.REFERENCE_BATCH_SIZE", 80], values("lr", lambda t: 0.05), QUICK),
]

OPTIMIZATION = [*PARAM_GROUPS, *SCHEDULES, *OPTIMIZERS, *STEPS]
