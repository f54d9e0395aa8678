"""The training scripts, as a user calls them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import plain_train_net, train_net
from trainkit.engine import default_argument_parser
from trainkit.utils.logger import close_logger

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def closed_logger():
    yield
    close_logger()


def run(tool, output_dir, *arguments):
    return tool.main(default_argument_parser().parse_args([*arguments, "OUTPUT_DIR", str(output_dir)]))


def error_of(capsys, output_dir, *arguments):
    with pytest.raises(SystemExit) as caught:
        run(train_net, output_dir, *arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    return error


def losses(output_dir):
    rows = [json.loads(line) for line in (output_dir / "metrics.json").read_text().splitlines()]
    return {row["iteration"]: row["total_loss"] for row in rows if "total_loss" in row}


SHORT = (
    "SOLVER.MAX_ITER",
    "20",
    "SOLVER.WARMUP_ITERS",
    "5",
    "SOLVER.CHECKPOINT_PERIOD",
    "10",
    "TEST.EVAL_PERIOD",
    "10",
)
EVERY = ("LOG.PERIOD", "1", "LOG.WINDOW", "1", "LOG.WRITERS", "['json']")


def test_trainer_and_plain_loop_give_the_same_losses_and_weights_bit_for_bit(tmp_path):
    # the plain loop evaluates the test data only
    options = (*SHORT, *EVERY, "DATASETS.VAL", "()")
    run(train_net, tmp_path / "trainer", *options)
    run(plain_train_net, tmp_path / "plain", *options)
    run(plain_train_net, tmp_path / "other", *options, "SEED", "1")
    assert len(losses(tmp_path / "plain")) == 20
    assert losses(tmp_path / "trainer") == losses(tmp_path / "plain")
    assert losses(tmp_path / "other") != losses(tmp_path / "plain")
    one, two = (torch.load(tmp_path / name / "model_final.pth")["model"] for name in ("trainer", "plain"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_eval_only_gives_the_results_of_the_last_checkpoint_and_leaves_the_folder_alone(tmp_path):
    results = run(train_net, tmp_path, *SHORT)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "log.txt"}
    assert run(train_net, tmp_path, "--eval-only", *SHORT) == results
    weights = ("MODEL.WEIGHTS", str(tmp_path / "model_0000009.pth"))
    assert run(train_net, tmp_path, "--eval-only", *SHORT, *weights) != results
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "log.txt"} == before


def test_resume_without_a_checkpoint_says_so_and_trains(tmp_path):
    run(train_net, tmp_path, "--resume", *SHORT, "SOLVER.MAX_ITER", "3", "SOLVER.WARMUP_ITERS", "1")
    log = (tmp_path / "log.txt").read_text()
    assert "No checkpoint to resume from" in log
    assert (tmp_path / "model_final.pth").exists()


@pytest.mark.parametrize("tool", [train_net, plain_train_net])
def test_the_trial_run_goes_through_every_part(tmp_path, tool):
    run(tool, tmp_path, "--fast-dev-run")
    trial = tmp_path / "fast_dev_run"
    assert {"model_0000002.pth", "model_final.pth", "metrics.json", "config.yaml"} <= {p.name for p in trial.iterdir()}
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("SOLVER.MAX_ITR", "3"), "SOLVER.MAX_ITER"),
        (("SOLVER.BASE_LR", "fast"), "SOLVER.BASE_LR"),
        (("SOLVER.BASE_LR",), "OUTPUT_DIR"),
        (("--eval-only",), "there is nothing to evaluate"),
        (("--config-file", "no/such.yaml"), "no/such.yaml"),
        (("MODEL.NAME", "DigitsCNM"), "DigitsCNN"),
        (("DATASETS.TRAIN", "['digits_trian']"), "digits_train"),
        (("SOLVER.OPTIMIZER.NAME", "Adan"), "Adam"),
        (("SOLVER.OPTIMIZER.BETA", "0.9"), "beta=0.9"),
        (("MODEL.WEIGHTS", "no/weights.pth"), "no/weights.pth"),
        (("TEST.EVALUATORS", "['ClassificationEvaluatr']"), "ClassificationEvaluator"),
        (("LOG.WRITERS", "['jsn']"), "jsn"),
        (("MODEL.DEVICE", "cuda:99"), "cuda:99"),
        (("MODEL.DEVICE", "cpu:7"), "MODEL.DEVICE: there is one cpu, got 'cpu:7'"),
        (("SEED", "-7"), "SEED"),
        (("TEST.EVAL_PERIOD", "-5"), "TEST.EVAL_PERIOD"),
        (("DATASETS.TEST", "['digits_tset']"), "digits_test"),
        (("MODEL.WIDTH", "0"), "MODEL.WIDTH is 0; accepted: a number of at least 1"),
        (("MODEL.WIDTH", "a"), "MODEL.WIDTH: got 'a' (str); accepted: a number"),
    ],
)
def test_a_mistake_on_the_command_line_ends_with_one_message_and_code_2(tmp_path, capsys, arguments, message):
    assert message in error_of(capsys, tmp_path / "run", *arguments)


def test_the_plain_loop_evaluates_the_last_checkpoint_and_says_that_it_cannot_resume(tmp_path, capsys):
    short = (*SHORT, "SOLVER.MAX_ITER", "3", "SOLVER.WARMUP_ITERS", "1")
    results = run(plain_train_net, tmp_path, *short)
    assert run(plain_train_net, tmp_path, "--eval-only", *short) == results
    for arguments, message in [
        (["--resume", *short], "--resume is given, but the plain loop cannot resume"),
        (["--num-gpus", "2", *short], "--num-gpus: got 2 (int); accepted: 1, or start"),
        (["--eval-only", "--fast-dev-run", *short], "there is nothing to evaluate"),
    ]:
        capsys.readouterr()
        with pytest.raises(SystemExit):
            run(plain_train_net, tmp_path, *arguments)
        assert message in capsys.readouterr().err


def test_a_broken_weights_file_is_named(tmp_path, capsys):
    (tmp_path / "broken.pth").write_bytes(b"PK\x03\x04 not a checkpoint")
    error = error_of(capsys, tmp_path / "run", "MODEL.WEIGHTS", str(tmp_path / "broken.pth"))
    assert "broken.pth" in error


def test_the_weights_of_another_model_are_shown_as_one_table(tmp_path, capsys):
    torch.save({"other.weight": torch.zeros(2, 3)}, tmp_path / "other.pth")
    error = error_of(capsys, tmp_path / "run", "MODEL.WEIGHTS", str(tmp_path / "other.pth"))
    assert "other.weight" in error
    assert "layers.0.weight" in error


@pytest.mark.slow
def test_the_process_itself_ends_with_code_2_and_no_traceback(tmp_path):
    command = [sys.executable, "tools/train_net.py", "SOLVER.MAX_ITR", "3", "OUTPUT_DIR", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "SOLVER.MAX_ITER" in done.stderr
    assert not (tmp_path / "run").exists()
