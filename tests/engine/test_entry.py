"""A training script in one call."""

import pytest

from tests.docs.pages import contents
from tests.engine.job import tiny_cfg
from trainkit.config import get_cfg
from trainkit.engine import DefaultTrainer, default_argument_parser, run
from trainkit.utils.logger import close_logger


@pytest.fixture(autouse=True)
def closed_logger():
    yield
    close_logger()


def run_with(cfg, *arguments):
    return run(default_argument_parser().parse_args(arguments), DefaultTrainer, cfg)


def test_the_file_and_the_settings_of_the_command_are_merged_into_a_copy(tmp_path):
    (tmp_path / "job.yaml").write_text("SOLVER: {BASE_LR: 0.25, MAX_ITER: 4}\n")
    cfg = tiny_cfg(tmp_path / "run")
    before = cfg.clone()
    results = run_with(cfg, "--config-file", str(tmp_path / "job.yaml"), "SOLVER.MAX_ITER", "3")
    assert "classification" in results
    assert cfg == before
    used = get_cfg()
    used.merge_from_file(tmp_path / "run/config.yaml")
    before.merge_from_list(["SOLVER.BASE_LR", 0.25, "SOLVER.MAX_ITER", 3])
    assert used == before


def test_a_finished_run_is_evaluated_without_a_trace_and_resumed_where_it_was(tmp_path):
    cfg = tiny_cfg(tmp_path / "run")
    run_with(cfg)
    before = contents(tmp_path / "run")
    assert run_with(cfg, "--eval-only")["classification"]["top1"] > 50
    assert contents(tmp_path / "run") == before
    run_with(cfg, "--resume", "SOLVER.MAX_ITER", "12")
    assert "Training from iteration 10 to 12" in (tmp_path / "run/log.txt").read_text()
