"""The jobs of the projects, killed at events that are drawn, and resumed; see tests/exactness."""

from pathlib import Path

import pytest

from tests.exactness.jobs import Configured
from tests.exactness.machine import check
from tests.projects import test_charlm as charlm
from tests.projects import test_segmentation as segmentation
from tests.projects import test_selfsup as selfsup
from tests.projects import test_selfsup_clusters as clusters
from tests.two_ranks import on_two_ranks
from trainkit.engine import HookBase


def jobs(make_cfg, names):
    return {
        name: Configured(make_cfg=lambda folder, name=name: make_cfg(name, folder))
        for name in names
    }


CLUSTERS = {
    **jobs(clusters.config, clusters.SHORT),
    "foreign": Configured(make_cfg=clusters.foreign),
}
SELFSUP = jobs(selfsup.config, selfsup.SMALL)
JOBS = {**CLUSTERS, **SELFSUP, **jobs(segmentation.short, segmentation.CONFIGS)}
JOBS["charlm"] = Configured(make_cfg=charlm.short)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "foreign" else pytest.mark.slow) for name in JOBS],
)
def test_a_run_that_is_killed_at_any_event_and_resumed_ends_as_the_whole_one(tmp_path, name):
    check(JOBS[name], tmp_path)


class WithoutHooks(HookBase):
    """Leaves the states of the other hooks out of checkpoints."""

    def before_save(self, state):
        state["trainer"] = {**state["trainer"], "hooks": {}}


@pytest.mark.parametrize(
    "name",
    [
        "foreign",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("swav", *CLUSTERS)
            if name != "foreign"
        ),
    ],
)
def test_without_the_states_of_the_hooks_a_resumed_run_differs(tmp_path, name):
    job = Configured(make_cfg=JOBS[name].make_cfg, hooks=[WithoutHooks])
    with pytest.raises(AssertionError, match="killed at event"):
        check(job, tmp_path, num_kills=6)


def swav(rank, folder):
    check(SELFSUP["swav"], Path(folder), num_kills=2)
    return "same"


@pytest.mark.slow
def test_each_of_two_ranks_resumes_its_own_queue(tmp_path):
    assert on_two_ranks([swav], tmp_path)["swav"] == ["same"] * 2
