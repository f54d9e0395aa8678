"""That the loop never waits for a GPU, measured as the benchmark does."""

import importlib
from pathlib import Path

import pytest
import torch

from trainkit.engine import HookBase

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class ReadLoss(HookBase):
    """What many loops do in every step."""

    def after_step(self):
        self.trainer.losses["loss_square"].item()


@pytest.fixture(scope="module")
def cuda():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield importlib.import_module("benchmarks.cuda")


def test_100_steps_with_everything_on_never_synchronize(cuda, tmp_path):
    row = cuda.synchronizations(tmp_path)

    assert (row.value, row.note, row.holds) == (0, "", True)


def test_a_hook_that_reads_the_loss_is_seen(cuda, tmp_path):
    row = cuda.synchronizations(tmp_path, [ReadLoss()])

    assert (row.value, row.holds) == (1, False)
    assert row.note.startswith("iteration 40: called a synchronizing CUDA operation")


def test_21_steps_that_span_a_write_return_while_the_device_sleeps(cuda, tmp_path):
    assert cuda.run_ahead(tmp_path).holds


def test_steps_that_read_the_loss_return_when_the_device_wakes_up(cuda, tmp_path):
    assert not cuda.run_ahead(tmp_path, [ReadLoss()]).holds
