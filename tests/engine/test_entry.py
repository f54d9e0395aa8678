"""A training script in one call, and scripts of their own that leave an option out."""

import pytest

from tests.docs.pages import contents
from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError, get_cfg
from trainkit.engine import DefaultTrainer, default_argument_parser, default_setup, run
from trainkit.utils.logger import close_logger


@pytest.fixture(autouse=True)
def closed_logger():
    yield
    close_logger()


def args_of(*arguments):
    return default_argument_parser().parse_args(arguments)


@pytest.fixture
def finished(tmp_path):
    """The config of a run that has finished, and the content of its files."""
    cfg = tiny_cfg(tmp_path / "run")
    run(args_of(), DefaultTrainer, cfg)
    assert (tmp_path / "run/model_final.pth").exists()
    return cfg, contents(tmp_path / "run")


# ---------------------------------------------------------------------- run


def test_the_file_and_the_settings_of_the_command_are_merged_into_a_copy(tmp_path):
    (tmp_path / "job.yaml").write_text("SOLVER: {BASE_LR: 0.25, MAX_ITER: 4}\n")
    cfg = tiny_cfg(tmp_path / "run")
    before = cfg.clone()
    command = ["--config-file", str(tmp_path / "job.yaml"), "SOLVER.MAX_ITER", "3"]
    assert "classification" in run(args_of(*command), DefaultTrainer, cfg)
    assert cfg == before
    used = get_cfg()
    used.merge_from_file(tmp_path / "run/config.yaml")
    before.merge_from_list(["SOLVER.BASE_LR", 0.25, "SOLVER.MAX_ITER", 3])
    assert used == before


def test_a_frozen_config_is_complete(tmp_path):
    cfg = tiny_cfg(tmp_path, "SOLVER.MAX_ITER", 3)
    cfg.freeze()
    run(args_of("SOLVER.MAX_ITER", "5"), DefaultTrainer, cfg)
    assert "Training from iteration 0 to 3" in (tmp_path / "log.txt").read_text()


def test_an_evaluation_leaves_the_files_of_a_finished_run_as_they_are(tmp_path, finished):
    cfg, before = finished
    results = run(args_of("--eval-only"), DefaultTrainer, cfg)
    assert results["classification"]["top1"] > 50
    assert contents(tmp_path / "run") == before


def test_a_run_goes_on_where_it_was(tmp_path, finished):
    cfg, _ = finished
    run(args_of("--resume", "SOLVER.MAX_ITER", "12"), DefaultTrainer, cfg)
    assert "Training from iteration 10 to 12" in (tmp_path / "run/log.txt").read_text()


@pytest.mark.parametrize("command", [["SOLVER.MAX_ITR", "3"], ["SOLVER.MAX_ITER", "0"], ["--config-file", "no.yaml"]])
def test_a_mistake_in_the_command_is_one_message(tmp_path, capsys, command):
    with pytest.raises(SystemExit) as caught:
        run(args_of(*command), DefaultTrainer, tiny_cfg(tmp_path / "run"))
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- scripts that call the parts themselves


def set_up(cfg, *arguments):
    """What a script copied from detectron2 does; gives the trainer."""
    cfg = cfg.clone()
    cfg.merge_from_list(["LOG.PERIOD", 5])
    default_setup(cfg, args_of(*arguments))
    return DefaultTrainer(cfg)


def test_a_script_that_trains_under_eval_only_is_stopped_before_it_writes(tmp_path, finished):
    cfg, before = finished
    trainer = set_up(cfg, "--eval-only")
    trainer.resume_or_load(resume=False)
    with pytest.raises(ConfigError, match="--eval-only is given, but the script trains; call trainkit.engine.run"):
        trainer.train()
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("load", [lambda trainer: None, lambda trainer: trainer.resume_or_load(resume=False)])
def test_a_script_that_starts_over_under_resume_is_stopped_before_it_loses_the_run(tmp_path, finished, load):
    cfg, _ = finished
    trainer = set_up(cfg, "--resume", "SOLVER.MAX_ITER", "12")
    before = contents(tmp_path / "run")
    load(trainer)
    with pytest.raises(ConfigError, match="--resume is given, but the script starts at iteration 0; call"):
        trainer.train()
    assert contents(tmp_path / "run") == before


def test_a_script_that_resumes_may_train_in_pieces(tmp_path):
    trainer = set_up(tiny_cfg(tmp_path), "--resume")  # there is nothing to resume from yet
    trainer.train(max_iter=6)
    trainer.train(max_iter=10)
    resumed = set_up(tiny_cfg(tmp_path), "--resume")
    resumed.resume_or_load(resume=True)
    resumed.train(max_iter=12)
    assert (trainer.iter, resumed.start_iter, resumed.iter) == (10, 10, 12)


def test_the_command_concerns_its_own_config_only(tmp_path):
    set_up(tiny_cfg(tmp_path / "evaluated"), "--eval-only")
    trainer = DefaultTrainer(tiny_cfg(tmp_path / "trained"))
    trainer.train()
    assert trainer.status == "finished"
