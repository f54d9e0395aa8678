"""The names of the README are found, and schedules keep their last value."""

import pytest
from fvcore.common import param_scheduler as schedules

from tests.docs.pages import blocks
from trainkit.solver import KeepLastValue

(NAMES,) = blocks("projects/compat/README.md", "python")


def test_every_name_is_there():
    exec(NAMES, {})


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (schedules.MultiStepParamScheduler([1.0, 0.5], num_updates=10, milestones=[5]), 0.5),
        (schedules.StepWithFixedGammaParamScheduler(1.0, 1, 0.25, 10), 0.25),
        (schedules.LinearParamScheduler(1.0, 0.125), 0.125),
    ],
)
def test_the_last_value_of_a_schedule_stays(schedule, expected):
    kept = KeepLastValue(schedule)
    assert kept(0.0) == 1.0
    assert kept(1.0) == expected
    assert kept(1.5) == expected
