"""A job in the cells of a notebook, run by a real kernel."""

import re
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

BEGIN = """
from argparse import Namespace
from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer, default_setup

options = ["SOLVER.MAX_ITER", 1_000_000, "SOLVER.STEPS", (), "TEST.EVAL_PERIOD", 50, "SOLVER.CHECKPOINT_PERIOD", 10**6]
cfg = tiny_cfg({folder!r}, *options, "LOG.WRITERS", ["console", "json"], "LOG.PROGRESS", True)
default_setup(cfg, Namespace())
trainer = DefaultTrainer(cfg)
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The output of three cells: one builds, one trains until it is interrupted, one goes on."""
    manager, client = start_new_kernel(cwd=str(ROOT))
    try:

        def run(code, interrupt_at=None):
            """What it has printed, with widgets as [[text]], and the name of its error."""
            request, printed, error = client.execute(code), "", None
            while True:
                message = client.get_iopub_msg(timeout=120)
                content = message["content"]
                if message["parent_header"].get("msg_id") != request:
                    continue
                if message["msg_type"] == "stream":
                    printed += content["text"]
                    if interrupt_at is not None and interrupt_at in printed:
                        manager.interrupt_kernel()
                        interrupt_at = None
                elif message["msg_type"] == "display_data":
                    printed += f"[[{content['data']['text/plain']}]]"
                elif message["msg_type"] == "error":
                    error = content["ename"]
                elif content.get("execution_state") == "idle":
                    return printed, error

        folder = str(tmp_path_factory.mktemp("notebook"))
        yield [
            run(BEGIN.format(folder=folder)),
            run("trainer.train()", "Evaluated after"),
            run("trainer.train(max_iter=trainer.iter + 50); print(repr(trainer))"),
        ]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_an_interrupt_stops_behind_a_step_and_train_goes_on_from_there(cells):
    (_, no_error), (stopped, error), (went_on, neither) = cells
    assert (no_error, error, neither) == (None, "KeyboardInterrupt", None)
    num_done = int(re.search(r"The run was stopped after (\d+) of 1000000 iterations", stopped)[1])
    assert "or trainer.train()\n" in stopped
    assert f"Training from iteration {num_done} to {num_done + 50}" in went_on
    num_done += 50
    representation = rf"DefaultTrainer\(after {num_done} of {num_done} iterations, finished, \S+notebook0\)"
    assert re.fullmatch(representation, went_on.splitlines()[-1])


def test_each_run_has_one_bar_which_is_a_widget_and_evaluations_none(cells):
    for printed, _ in cells[1:]:
        bars = re.findall(r"\[\[(.*?)\]\]|\r\S", printed)
        assert len(bars) == 1
        assert re.match(r"\[Epoch \d+/\d+\] +\d+%\|", bars[0])
        assert "Evaluating" not in printed
