"""What a run shows in the terminal, and what only the files of its log have."""

import pytest

from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer, default_argument_parser, default_setup
from trainkit.utils.logger import close_logger


@pytest.fixture
def shown(tmp_path, capsys):
    """Train with these options of the command and settings; (the terminal, ``log.txt``)."""

    def train(*command):
        args = default_argument_parser().parse_args([*command])
        cfg = tiny_cfg(tmp_path / "run", "LOG.WRITERS", ["console"], *args.opts)
        default_setup(cfg, args)
        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=False)
        trainer.train()
        close_logger()
        return capsys.readouterr().out, (tmp_path / "run" / "log.txt").read_text()

    return train


def test_an_evaluation_during_training_is_one_line_and_the_final_one_a_table(shown):
    terminal, log = shown()
    assert terminal.count("Evaluated after 5 of 10 iterations: classification/top1 ") == 1
    assert terminal.count("Total inference time") == terminal.count("Evaluation results") == 1
    assert log.count("Total inference time") == log.count("Evaluation results") == 2
    assert terminal.index("Total inference time") > terminal.index("after 10 of 10 iterations")
    for text in ("(torch uses ", "TinyClassifier(\n"):  # the environment and the model
        assert (text in terminal, text in log) == (False, True)


def test_a_quiet_run_shows_nothing_but_warnings_and_errors(shown):
    terminal, log = shown("--quiet")
    assert terminal == ""
    assert "after 10 of 10 iterations" in log
