"""Schedules that a config lists."""

import logging

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from trainkit.projects.solver_extras.schedules import Chain, Cosine, Linear, Segment

from trainkit.config import ConfigError, get_cfg, resolve_lengths
from trainkit.solver import SCHEDULE_REGISTRY, LRMultiplier, build_lr_scheduler, build_schedule


@SCHEDULE_REGISTRY.register()
def Halve(length, often=1):  # as a class would be called
    return lambda t, base: base / 2 ** (often * t // length)


def make_cfg(*entries, **solver):
    cfg = get_cfg()
    cfg.merge_from_other_cfg({"SOLVER": {"MAX_ITER": 10, "SCHEDULES": list(entries), **solver}})
    return cfg


def build(cfg, lr=1.0):
    return build_lr_scheduler(cfg, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr))


def lrs_of(cfg, count=12, lr=1.0):
    scheduler = build(cfg, lr)
    lrs = []
    for _ in range(count):
        lrs += scheduler.get_last_lr()
        scheduler.optimizer.step()
        scheduler.step()
    return lrs


def test_entries_become_segments_that_end_with_the_run():
    entries = [{"NAME": "Linear", "END": 4, "START_FACTOR": 0.5}, {"NAME": "Cosine", "BEGIN": 4, "END_RATIO": 0.25}]
    expected = Chain([Segment(Linear(4, start_factor=0.5), 0, 4), Segment(Cosine(6, end_ratio=0.25), 4, 10)])
    found = build_schedule(entries, 10, "here")
    assert [found(t, 0.3) for t in range(25)] == [expected(t, 0.3) for t in range(25)]


def test_schedules_replace_the_schedule_with_a_name_and_the_log_says_so(caplog):
    caplog.set_level(logging.INFO)
    cfg = make_cfg({"NAME": "Step", "STEP_SIZE": 4, "GAMMA": 0.5}, LR_SCHEDULER_NAME="nonsense", WARMUP_ITERS=99)
    assert lrs_of(cfg) == [1.0] * 4 + [0.5] * 4 + [0.25] * 4  # the last value, that of iteration 9, stays
    assert "SOLVER.SCHEDULES is used; SOLVER.LR_SCHEDULER_NAME and SOLVER.WARMUP_* have no effect" in caplog.messages
    assert isinstance(build(make_cfg(WARMUP_ITERS=0)), LRMultiplier)


def test_lengths_in_epochs_are_resolved_before():
    entry = {"NAME": "MultiStep", "MILESTONES": ["1ep", 8], "GAMMA": 0.5}
    cfg = make_cfg({"NAME": "Linear", "END": "0.5ep", "START_FACTOR": 0.5}, entry)
    assert lrs_of(resolve_lengths(cfg, 6)) == [0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    with pytest.raises(ConfigError, match=r"SCHEDULES\[0\] \(Linear\): END: got '0.5ep' .*accepted: iterations"):
        build(cfg)


def test_a_schedule_of_the_users_is_found_and_gets_its_length():
    assert lrs_of(make_cfg({"NAME": "Halve", "END": 4, "OFTEN": 2}), 5) == [1.0, 1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("entry", "make"),
    [
        ({"NAME": "Cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, 6)),
        ({"NAME": "MultiStep", "MILESTONES": ["2ep", "4ep"]}, lambda o: lr_scheduler.MultiStepLR(o, [2, 4])),
    ],
)
def test_a_value_may_be_held_for_an_epoch_as_by_openmmlabs_by_epoch(entry, make):
    theirs = make(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4))
    rates = []
    for _ in range(6):
        rates += theirs.get_last_lr()
        theirs.optimizer.step()
        theirs.step()
    for iters_per_epoch in (1, 4):
        cfg = resolve_lengths(make_cfg({**entry, "STEP_SIZE": "1ep"}, MAX_ITER="6ep"), iters_per_epoch)
        expected = [rate for rate in rates for _ in range(iters_per_epoch)]
        assert lrs_of(cfg, len(expected), lr=0.4) == pytest.approx(expected)
    if entry["NAME"] != "MultiStep":
        every_iteration = resolve_lengths(make_cfg(entry, MAX_ITER="6ep"), iters_per_epoch)
        assert lrs_of(every_iteration, len(expected), lr=0.4) != pytest.approx(expected)


def test_an_entry_that_never_begins_has_no_effect_and_a_warning_says_so(caplog):
    assert lrs_of(make_cfg({"NAME": "Linear", "BEGIN": 10, "START_FACTOR": 0.5}), 10) == [1.0] * 10
    assert "SOLVER.SCHEDULES[0] (Linear) has no effect: it starts at 10" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("Cosine", r"SCHEDULES\[1\] must be an entry such as \{NAME: Linear, END: 500\} .*; got 'Cosine'"),
        ({"NAME": "CosineAnneal"}, r"SCHEDULES\[1\] \(CosineAnneal\): NAME: .*did you mean 'Cosine'"),
        ({"NAME": "Step", "STEPSIZE": 3}, r"\[1\] \(Step\): unknown 'STEPSIZE'; did you mean 'STEP_SIZE'"),
        ({"NAME": "Step", "STEP_SIZE": 0}, r"\[1\] \(Step\) refuses STEP_SIZE=0: "),
        ({"NAME": "MultiStep", "MILESTONES": 5}, r"\[1\] \(MultiStep\) refuses MILESTONES=5: "),
        ({"NAME": "CosineRestarts", "PERIODS": [2, 3], "WEIGHTS": [1]}, "weights must be one for each period"),
        ({"NAME": "OneCycle", "PCT_START": 0.1}, "pct_start 0.1 leaves no room"),
        ({"NAME": "Cosine", "END_VALUE": 0.1, "END_RATIO": 0.2}, "end_value 0.1 and end_ratio 0.2 both"),
        ({"NAME": "Cosine", "BEGIN": 5, "END": 5}, r"\[1\] \(Cosine\): END: got 5 .*accepted: iterations, an int >= 6"),
    ],
    ids=str,
)
def test_a_wrong_entry_is_an_error_that_names_it(entry, message):
    with pytest.raises(ConfigError, match=message):
        build(make_cfg({"NAME": "Linear"}, entry))
