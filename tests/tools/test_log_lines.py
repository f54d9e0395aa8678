"""What one sees on the terminal while the jobs of this repository run."""

import os
from pathlib import Path

import pytest

from tools import train_net
from trainkit.engine import default_argument_parser
from trainkit.utils.logger import close_logger

ROOT = Path(__file__).parents[2]
SHORT = ["SOLVER.MAX_ITER", 12, "SOLVER.WARMUP_ITERS", 10, "SOLVER.CHECKPOINT_PERIOD", 4]
SHORT += ["TEST.EVAL_PERIOD", 4, "LOG.PERIOD", 2]
SMALL_TEXT = ["MODEL.GPT.WIDTH", 16, "MODEL.GPT.DEPTH", 1, "TEST.MAX_BATCHES", 2]
OTHER_SETTINGS = ["SOLVER.BASE_LR", 0.05, "SOLVER.IMS_PER_BATCH", 32, "SEED", 5, "NUM_THREADS", 2]


@pytest.fixture
def lines(tmp_path, monkeypatch, capsys):
    """Runs a job in ``out``, and returns the lines that it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        args = default_argument_parser().parse_args([*map(str, arguments), "OUTPUT_DIR", "out"])
        try:
            train_net.main(args)
        finally:
            close_logger()
        printed = capsys.readouterr().out
        assert "of 12 iterations" in printed or args.eval_only
        # a long path is no fault
        return printed.replace(f"{tmp_path}{os.sep}", "").splitlines()

    return run


def too_long(lines):
    return [line for line in lines if len(line) > 120]


def test_the_lines_of_the_digits_fit_also_if_they_resume_with_other_settings(lines):
    lines_of_start = lines(*SHORT)
    assert any("never reaches" in line for line in lines_of_start)
    assert too_long(lines_of_start) == []
    newest = Path("out/model_final.pth")
    newest.write_bytes(newest.read_bytes()[:2000])

    lines_of_resume = lines("--resume", *SHORT, *OTHER_SETTINGS)

    for text in ("Resuming from", "written with other settings", "data are not those"):
        assert any(text in line for line in lines_of_resume)
    assert too_long(lines_of_resume) == []
    assert too_long(lines("--eval-only")) == []


def test_the_lines_of_the_text_fit_with_all_their_metrics(lines):
    config = ROOT / "projects" / "charlm" / "config.yaml"
    printed = lines("--config-file", config, *SHORT, *SMALL_TEXT)
    assert any("mfu_pct: " in line for line in printed)
    assert too_long(printed) == []
