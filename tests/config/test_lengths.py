"""Lengths in epochs become iterations."""

from fractions import Fraction

import pytest

from trainkit.config import LENGTH_KEYS, ConfigError, Epochs, get_cfg, parse_length, resolve_lengths
from trainkit.config.yaml_files import load_yaml
from trainkit.solver import build_schedule
from trainkit.utils.periods import is_nth


@pytest.mark.parametrize(
    ("value", "length"), [(500, 500), (0, 0), ("3ep", Epochs(3.0)), ("0.5ep", Epochs(0.5)), ("0ep", Epochs(0.0))]
)
def test_a_length_is_iterations_or_epochs(value, length):
    assert parse_length(value) == length


@pytest.mark.parametrize("value", [True, 1.5, "3", "ep", "-1ep", "3 ep", "3epochs", ".ep", "1e1ep", None, [3]])
def test_anything_else_is_no_length(value):
    with pytest.raises(ConfigError, match="accepted: iterations"):
        parse_length(value)


@pytest.mark.parametrize(
    ("epochs", "iters_per_epoch", "iters"),
    [("3ep", 7, 21), ("0.5ep", 7, 4), ("0.01ep", 7, 1), ("0ep", 7, 0), ("0.35ep", 20, 7), ("1ep", 1, 1)],
)
def test_epochs_are_rounded_to_iterations_and_at_least_one(epochs, iters_per_epoch, iters):
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.MAX_ITER", epochs])
    resolved = resolve_lengths(cfg, iters_per_epoch)
    assert (iters,) == (resolved.SOLVER.MAX_ITER,)


def test_every_length_key_is_resolved_and_nothing_else_changes():
    cfg = get_cfg()
    items = [[key, ["1ep", 5, "2ep"] if key == "SOLVER.STEPS" else "2ep"] for key in LENGTH_KEYS]
    cfg.merge_from_list([item for pair in items for item in pair])
    expected = get_cfg()
    for key in LENGTH_KEYS:
        expected.merge_from_list([key, (10, 5, 20) if key == "SOLVER.STEPS" else 20])
    assert resolve_lengths(cfg, 10) == expected


def test_epochs_anywhere_in_schedules_and_hooks_are_resolved():
    def entries(one, two):
        nested = {"NAME": "MultiStep", "MILESTONES": [5, two], "GAMMA": 0.5}
        return {
            "SOLVER": {"SCHEDULES": [{"NAME": "Linear", "END": one, "FACTOR": 1, "X": None}, nested]},
            "HOOKS": [{"NAME": "3epochs", "PERIOD": two, "ON": True}, {"NAME": "B", "SCHEDULES": [nested]}],
        }

    cfg, expected = get_cfg(), get_cfg()
    cfg.merge_from_other_cfg(entries("1ep", "2ep"))
    expected.merge_from_other_cfg(entries(10, 20))
    before = cfg.clone()
    assert resolve_lengths(cfg, 10) == expected
    assert cfg == before
    with pytest.raises(ConfigError, match=r"HOOKS\[0\]\.PERIOD: got '2ep' .*has no length"):
        resolve_lengths(cfg, None)
    cfg.HOOKS = []
    with pytest.raises(ConfigError, match=r"SOLVER\.SCHEDULES\[0\]\.END: got '1ep' .*has no length"):
        resolve_lengths(cfg, None)


def test_the_argument_is_untouched_and_frozen_stays_frozen():
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.MAX_ITER", "2ep", "SOLVER.STEPS", "['1ep']"])
    assert not resolve_lengths(cfg, 10).is_frozen()
    cfg.freeze()
    resolved = resolve_lengths(cfg, 10)
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS) == ("2ep", ("1ep",))
    assert (resolved.SOLVER.MAX_ITER, resolved.SOLVER.STEPS) == (20, (10,))
    assert resolved.is_frozen()
    assert resolved.SOLVER.is_frozen()


def test_epochs_of_data_without_a_length_are_an_error_that_names_the_key():
    cfg = get_cfg()
    assert resolve_lengths(cfg, None) == cfg
    cfg.merge_from_list(["SOLVER.STEPS", "(5, '1ep')"])
    with pytest.raises(ConfigError, match=r"SOLVER\.STEPS\[1\]: got '1ep' .*has no length"):
        resolve_lengths(cfg, None)


@pytest.mark.parametrize(
    ("samples", "batch", "accumulation"), [(32, 8, 3), (1197, 64, 16), (40, 16, 1), (1000, 7, 11), (10, 64, 2)]
)
def test_every_boundary_of_epochs_is_rounded_by_itself_so_that_no_error_adds_up(samples, batch, accumulation):
    per_iter = batch * accumulation
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.STEPS", [f"{n}ep" for n in range(1, 300)]])
    resolved = resolve_lengths(cfg, Fraction(samples, per_iter))
    assert [*resolved.SOLVER.STEPS] == [max(1, round(n * samples / per_iter)) for n in range(1, 300)]
    for n, iters in enumerate(resolved.SOLVER.STEPS, start=1):
        assert abs(iters * per_iter - n * samples) <= per_iter  # samples


def test_a_period_in_epochs_ends_where_the_epochs_end():
    cfg = get_cfg()
    cfg.merge_from_list(["TEST.EVAL_PERIOD", "1ep", "CHECKPOINT.START", "2ep"])
    cfg.HOOKS = [{"NAME": "A", "PERIOD": "2ep"}]
    cfg.SOLVER.SCHEDULES = [{"NAME": "Step", "STEP_SIZE": "1ep"}, {"NAME": "CosineRestarts", "PERIODS": ["1ep"] * 6}]
    resolved = resolve_lengths(cfg, Fraction(4, 3)).clone()  # boundaries 1, 3, 4, 5, 7, 8
    period, start = resolved.TEST.EVAL_PERIOD, resolved.CHECKPOINT.START
    assert [done for done in range(9) if is_nth(done, period)] == [1, 3, 4, 5, 7, 8]
    assert [done for done in range(9) if is_nth(done, period, start)] == [3, 4, 5, 7, 8]
    assert [done for done in range(9) if is_nth(done, resolved.HOOKS[0]["PERIOD"])] == [3, 5, 8]
    step, restarts = (build_schedule([entry], 8, "here") for entry in resolved.SOLVER.SCHEDULES)
    assert [step(t, 1.0) for t in range(9)] == pytest.approx([0.1**n for n in (0, 1, 1, 2, 3, 4, 4, 5, 5)])
    assert [t for t in range(8) if restarts(t, 1.0) == 1.0] == [0, 1, 3, 4, 5, 7]

    other = get_cfg()
    other.merge_from_other_cfg(load_yaml(resolved.dump(), "here"))  # as whole numbers
    assert (period, start, type(other.TEST.EVAL_PERIOD)) == (1, 3, int)
