"""With logical ranks, a run ends with the same bits on 1, 2 and 4 processes, and when their number changes."""

import pytest
import torch
from trainkit.projects.logical_ranks.tests.logical_job import EVERYTHING, read_metrics, train_on
from trainkit.projects.replay import replay
from trainkit.projects.replay.tests.job import Job

from tests.exactness.machine import content
from trainkit.checkpoint.file import read_file
from trainkit.data import DatasetCatalog

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("of_four")
    assert train_on(4, folder, options=EVERYTHING)
    return folder


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_job_with_everything_ends_with_the_same_bytes_on_any_number_of_processes(of_four, tmp_path, num_ranks):
    assert train_on(num_ranks, tmp_path, options=EVERYTHING)
    assert content(tmp_path) == content(of_four)
    state = read_file(of_four / "model_final.pth")
    assert state["trainer"]["iteration"] == 7  # it has stopped early
    assert {"model_best.pth", "model_0000005.pth"} <= content(of_four)[0].keys()
    assert "ranks" not in state
    assert {"grad_norm", "loss/total_loss", "classification/top1", "drawn"} <= set().union(*read_metrics(of_four))


def test_a_run_that_is_killed_goes_on_with_2_then_1_then_4_processes_to_the_same_bytes(of_four, tmp_path):
    for num_ranks, kill_at in ((4, 2), (2, 4), (1, 6)):
        assert not train_on(num_ranks, tmp_path, options=EVERYTHING, resume=True, kill_at=kill_at)
    assert train_on(4, tmp_path, options=EVERYTHING, resume=True)
    assert content(tmp_path) == content(of_four)


def test_a_step_of_four_processes_is_replayed_in_one_to_the_last_bit(of_four):
    found = replay(of_four, 5, Job(of_four, *EVERYTHING), prove=True)
    assert found.proof == "every byte equals model_0000005.pth: model, optimizer, random state, data, hooks, storage"
    assert found.verdict.startswith("reproducible")
    labels = [sample["label"] for sample in DatasetCatalog.get("tiny_train")]
    named = [labels[int(name.split()[1])] for name in found.samples]  # each pass has the samples that the report names
    assert named == torch.cat([batch["label"] for batch in found.batch]).tolist()
    assert len(named) == 24
