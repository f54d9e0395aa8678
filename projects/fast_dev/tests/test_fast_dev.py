"""``--fast-dev-run``."""

import pytest

from tests.docs.pages import contents
from tests.engine.job import tiny_cfg
from trainkit.engine import (
    DefaultTrainer,
    default_argument_parser,
    default_setup,
    fast_dev_config,
    run,
)
from trainkit.utils.logger import close_logger

ARGS = default_argument_parser().parse_args(["--fast-dev-run"])


@pytest.fixture(autouse=True)
def closed_logger():
    yield
    close_logger()


def test_the_copy_has_its_own_folder_and_the_config_stays():
    cfg = tiny_cfg(
        "out", "SOLVER.MAX_ITER", "3ep", "HOOKS", [{"NAME": "RuntimeInfo", "PERIOD": 50}, "EMAHook"]
    )
    cfg.freeze()
    trial = fast_dev_config(cfg)
    assert cfg.OUTPUT_DIR == "out"
    assert cfg.SOLVER.MAX_ITER == "3ep"
    assert trial.OUTPUT_DIR == "out/fast_dev_run"
    assert trial.SOLVER.MAX_ITER == 6
    assert trial.TEST.EVAL_PERIOD == 3
    assert trial.HOOKS == [{"NAME": "RuntimeInfo", "PERIOD": 1}, "EMAHook", {"NAME": "LoadsAgain"}]
    assert trial.is_frozen()


def test_a_trial_run_leaves_the_files_of_a_finished_run_as_they_are(tmp_path):
    cfg = tiny_cfg(tmp_path / "run")
    DefaultTrainer(cfg).train()
    before = contents(tmp_path / "run")
    run(ARGS, DefaultTrainer, cfg)
    assert contents(tmp_path / "run") == before
    log = (tmp_path / "run/fast_dev_run/log.txt").read_text()
    assert "The trial run has ended" in log
    assert "without an error" in log


def test_a_script_of_ones_own_trains_with_the_config_that_it_has_set_up(tmp_path):
    cfg = tiny_cfg(tmp_path)
    cfg.freeze()
    default_setup(cfg, ARGS)
    trainer = DefaultTrainer(cfg)
    trainer.train()
    assert trainer.iter == 6
    assert (tmp_path / "fast_dev_run/model_final.pth").exists()
    default_setup(cfg, ARGS)  # a second time
    assert not (tmp_path / "fast_dev_run/fast_dev_run").exists()
