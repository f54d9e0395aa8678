"""That the loop never waits for a GPU, measured as the benchmark does."""

import importlib
from pathlib import Path

import pytest

from tests.cuda import needs_cuda
from trainkit.engine import HookBase

ROOT = Path(__file__).resolve().parents[2]


class ReadLoss(HookBase):
    """What many loops do in every step."""

    def after_step(self):
        self.trainer.losses["loss_square"].item()


@pytest.fixture(scope="module")
def cuda():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield importlib.import_module("benchmarks.cuda")


@needs_cuda
def test_100_steps_with_everything_on_never_synchronize_and_a_hook_that_reads_the_loss_is_seen(
    cuda, tmp_path
):
    row = cuda.synchronizations(tmp_path)
    assert (row.value, row.note, row.holds) == (0, "", True)
    row = cuda.synchronizations(tmp_path, [ReadLoss()])
    assert (row.value, row.holds) == (1, False)
    assert row.note.startswith("iteration 40: called a synchronizing CUDA operation")


@needs_cuda
def test_the_host_goes_two_steps_ahead_of_a_device_that_sleeps_and_no_further(cuda, tmp_path):
    assert cuda.run_ahead(tmp_path).value == 2
    # a hook that reads the loss keeps it from that
    assert cuda.run_ahead(tmp_path, [ReadLoss()]).value == 0
