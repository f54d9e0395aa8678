"""The jobs of the projects, killed at events that are drawn, and resumed; see tests/exactness."""

from pathlib import Path

import pytest

from tests.exactness.jobs import Configured
from tests.exactness.machine import check
from tests.projects import test_charlm as charlm
from tests.projects import test_segmentation as segmentation
from tests.projects import test_selfsup as selfsup
from tests.projects import test_selfsup_clusters as clusters
from tests.projects import test_selfsup_hooks as foreign
from tests.two_ranks import on_two_ranks
from trainkit.engine import HookBase

# name of a method -> the job of a project, and for a model that is not the project's
FOREIGN = {
    name: Configured(make_cfg=lambda folder, name=name: foreign.config(folder, name)) for name in foreign.ENTRIES
}
CLUSTERS = {
    name: Configured(make_cfg=lambda folder, name=name: clusters.config(name, folder)) for name in clusters.SHORT
}
SELFSUP = {name: Configured(make_cfg=lambda folder, name=name: selfsup.config(name, folder)) for name in selfsup.SMALL}
OTHERS = {
    name: Configured(make_cfg=lambda folder, name=name: segmentation.short(name, folder))
    for name in segmentation.CONFIGS
}
OTHERS["charlm"] = Configured(make_cfg=charlm.short)
JOBS = {**FOREIGN, **CLUSTERS}
SLOW = {**SELFSUP, **OTHERS}


@pytest.mark.parametrize("name", [*JOBS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_run_that_is_killed_at_any_event_and_resumed_ends_as_the_whole_one(tmp_path, name):
    check({**JOBS, **SLOW}[name], tmp_path)


class WithoutHooks(HookBase):
    """Leaves the states of the other hooks out of checkpoints."""

    def before_save(self, state):
        state["trainer"] = {**state["trainer"], "hooks": {}}


@pytest.mark.parametrize("name", ["SwAV", "DeepCluster", "ODC", *CLUSTERS])
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
