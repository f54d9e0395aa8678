"""Lengths in epochs become iterations."""

from fractions import Fraction

import pytest

from trainkit.config import LENGTH_KEYS, ConfigError, Epochs, get_cfg, parse_length, resolve_lengths
from trainkit.config.yaml_files import load_yaml
from trainkit.utils.periods import Period, is_nth


def test_a_length_is_iterations_or_epochs():
    assert parse_length(500) == 500
    assert parse_length("3ep") == Epochs(3.0)
    assert parse_length("0.5ep") == Epochs(0.5)


@pytest.mark.parametrize(
    "value", [True, 1.5, "3", "ep", "-1ep", "3 ep", "3epochs", ".ep", "1e1ep", None, [3]]
)
def test_a_length_of_another_form_is_an_error(value):
    with pytest.raises(ConfigError, match="accepted: iterations"):
        parse_length(value)


@pytest.mark.parametrize(
    ("epochs", "iters_per_epoch", "iters"),
    [("3ep", 7, 21), ("0.01ep", 7, 1), ("0ep", 7, 0), ("0.35ep", 20, 7)],
)
def test_epochs_are_rounded_to_iterations_and_at_least_one(epochs, iters_per_epoch, iters):
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.MAX_ITER", epochs])
    assert iters == resolve_lengths(cfg, iters_per_epoch).SOLVER.MAX_ITER


def test_every_length_key_and_entry_is_resolved_and_nothing_else_changes():
    def filled(one, two):
        nested = {"NAME": "MultiStep", "MILESTONES": [5, two], "GAMMA": 0.5}
        cfg = get_cfg()
        for key in LENGTH_KEYS:
            cfg.merge_from_list([key, [one, 5, two] if key == "SOLVER.STEPS" else two])
        cfg.SOLVER.SCHEDULES = [{"NAME": "Linear", "END": one, "FACTOR": 1, "X": None}, nested]
        cfg.HOOKS = [
            {"NAME": "3epochs", "PERIOD": two, "ON": True},
            {"NAME": "B", "SCHEDULES": [nested]},
        ]
        return cfg

    cfg = filled("1ep", "2ep")
    before = cfg.clone()
    assert resolve_lengths(cfg, 10) == filled(10, 20)
    assert cfg == before
    cfg.freeze()
    resolved = resolve_lengths(cfg, 10)
    assert resolved.is_frozen()
    assert resolved.SOLVER.is_frozen()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"HOOKS": [{"NAME": "A", "PERIOD": "2ep"}]}, r"HOOKS\[0\]\.PERIOD: got '2ep'"),
        ({"SOLVER": {"STEPS": (5, "1ep")}}, r"SOLVER\.STEPS\[1\]: got '1ep'"),
    ],
)
def test_epochs_of_data_without_a_length_are_an_error_that_names_the_key(settings, named):
    cfg = get_cfg()
    assert resolve_lengths(cfg, None) == cfg
    cfg.merge_from_other_cfg(settings)
    with pytest.raises(ConfigError, match=rf"{named} .*has no length"):
        resolve_lengths(cfg, None)


@pytest.mark.parametrize(
    ("samples", "per_iter", "first", "last"),
    [
        (32, 24, [1, 3, 4, 5, 7, 8], 399),
        (10, 128, [1] * 19 + [2] * 13 + [3], 23),
    ],
)
def test_every_boundary_of_epochs_is_rounded_by_itself_so_that_no_error_adds_up(
    samples, per_iter, first, last
):
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.STEPS", [f"{n}ep" for n in range(1, 300)]])
    resolved = resolve_lengths(cfg, Fraction(samples, per_iter))
    boundaries = [*resolved.SOLVER.STEPS]
    assert boundaries[: len(first)] == first
    assert boundaries[-1] == last
    for n, boundary in enumerate(boundaries, 1):
        if boundary > 1:
            assert 2 * abs(boundary * per_iter - n * samples) <= per_iter  # at most half too far


def test_a_period_in_epochs_ends_where_the_epochs_end():
    cfg = get_cfg()
    cfg.merge_from_list(["TEST.EVAL_PERIOD", "1ep", "CHECKPOINT.START", "2ep"])
    cfg.HOOKS = [{"NAME": "A", "PERIOD": "2ep"}]
    resolved = resolve_lengths(cfg, Fraction(4, 3)).clone()  # boundaries 1, 3, 4, 5, 7, 8
    period, start = resolved.TEST.EVAL_PERIOD, resolved.CHECKPOINT.START
    assert [done for done in range(9) if is_nth(done, period)] == [1, 3, 4, 5, 7, 8]
    assert [done for done in range(9) if is_nth(done, period, start)] == [3, 4, 5, 7, 8]
    assert [done for done in range(9) if is_nth(done, resolved.HOOKS[0]["PERIOD"])] == [3, 5, 8]
    other = get_cfg()
    other.merge_from_other_cfg(load_yaml(resolved.dump(), "here"))  # as whole numbers
    assert other.TEST.EVAL_PERIOD == 1
    assert other.CHECKPOINT.START == 3
    assert type(other.TEST.EVAL_PERIOD) is int


def test_only_periods_and_their_offsets_keep_a_fraction_of_an_iteration():
    cfg = get_cfg()
    for key in LENGTH_KEYS:
        cfg.merge_from_list([key, ["2ep"] if key == "SOLVER.STEPS" else "2ep"])
    cfg.HOOKS = [{"NAME": "A", "PERIOD": "2ep", "EVAL_PERIOD": "2ep", "BEGIN": "2ep", "X": "2ep"}]
    cfg.SOLVER.SCHEDULES = [{"NAME": "B", "PERIODS": ["2ep"], "MILESTONES": ["2ep"], "END": "2ep"}]
    resolved = resolve_lengths(cfg, Fraction(5, 3))
    period = Period(Fraction(10, 3))
    solver = resolved.SOLVER
    assert solver.MAX_ITER == 3
    assert solver.WARMUP_ITERS == 3
    assert [*solver.STEPS] == [3]
    assert resolved.EARLY_STOPPING.START == 3
    assert type(solver.MAX_ITER) is int
    assert period == solver.CHECKPOINT_PERIOD
    assert period == resolved.CHECKPOINT.START
    assert period == resolved.TEST.EVAL_PERIOD
    assert period == resolved.TEST.EVAL_START
    assert period == resolved.LOG.PERIOD
    assert period == resolved.VIS_PERIOD
    assert [
        {"NAME": "A", "PERIOD": period, "EVAL_PERIOD": period, "BEGIN": 3, "X": 3}
    ] == resolved.HOOKS
    assert [{"NAME": "B", "PERIODS": [period], "MILESTONES": [3], "END": 3}] == solver.SCHEDULES
