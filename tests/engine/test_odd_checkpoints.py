"""What a resume says of a checkpoint whose entries are of another type, size or kind than those of this run."""

import os
import threading
from contextlib import contextmanager

import pytest
import torch

from tests.engine.job import tiny_cfg
from trainkit.checkpoint import CheckpointError
from trainkit.config import ConfigError, get_cfg
from trainkit.engine import DefaultTrainer, default_argument_parser, default_setup, user_errors_exit
from trainkit.utils.logger import setup_logger

ODD = [
    ("hooks", [1, 2], "hooks"),
    ("hooks.EvalHook", [], "hook 'EvalHook'"),
    ("hooks.EvalHook.evaluated_iters", "x", "hook 'EvalHook'.*evaluated_iters .*got 'x'"),
    ("hooks.BestCheckpointer.best", "x", "hook 'BestCheckpointer'.*best .*got 'x'"),
    ("hooks.BestCheckpointer.seen_iter", torch.ones(3), "hook 'BestCheckpointer'.*seen_iter"),
    ("hooks.BestCheckpointer.not_better", None, "hook 'BestCheckpointer'.*not_better"),
    ("hooks.PeriodicCheckpointer.former_finals", 3, "hook 'PeriodicCheckpointer'"),
    ("hooks.LRScheduler.factors", "x", "hook 'LRScheduler'"),
    ("hooks.PeriodicWriter.writers", {"a": 1}, "hook 'PeriodicWriter'"),
    ("boundary", [], "the boundary"),
    ("boundary.is_over", 3, "the boundary.*is_over must be True or False, got 3"),
    ("boundary.passed", "EvalHook.after_step", "the boundary.*passed must be a list of names"),
    ("boundary.passed", [3], "the boundary.*passed must be a list of names"),
    ("end.max_iter", "x", "max_iter must be a whole number"),
    ("iteration", float("nan"), "iteration must be a whole number"),
    ("world_size", {}, "world_size must be a whole number"),
    ("rng.torch", torch.zeros(7, dtype=torch.uint8), "the random state"),
    ("rng.python", torch.ones(3), "the random state"),
    ("rng.numpy", [], "the random state"),
    ("storage.histories.total_loss.values", torch.ones(2), "the storage.*float32"),
    ("storage.histories.total_loss.iterations", torch.ones(1, dtype=torch.int64), "the storage"),
    ("storage.histories.total_loss.sum", "x", "the storage"),
    ("storage.smoothing_hints.total_loss", "x", "the storage"),
    ("storage.images", [{"name": "x", "tensor": "y", "iter": 1}], "the storage"),
    ("data.position", "x", "the position in the data.*position must be a whole number"),
    ("data_size.epoch", [1, 0], "the position in the data.*ZeroDivisionError"),
    ("_trainer.optimizer.param_groups.0.lr", "x", "the setting 'lr' is 'x'"),
    ("_trainer.optimizer.param_groups.0.betas", [0.9], "the setting 'betas'"),
    ("_trainer.optimizer.state.0.exp_avg", "x", "'exp_avg'.*has 'x'"),
    ("_trainer.optimizer.state.0.step", {"a": 1}, "'step'.*accepted: one number"),
    ("_trainer.optimizer.state.1", {"step": torch.ones(())}, "state of parameter 1 has .'step'"),
    ("_trainer.optimizer.param_groups.0.amsgrad", float("nan"), "the setting 'amsgrad' is nan"),
    ("origin.config", "a list", "the config in the checkpoint cannot be read"),
    ("origin.parents", 3, "TypeError"),
]


@pytest.fixture(scope="module")
def job():
    return [
        *("SOLVER.MAX_ITER", 4, "SOLVER.CHECKPOINT_PERIOD", 2, "TEST.EVAL_PERIOD", 2),
        *("CHECKPOINT.BEST_METRIC", "classification/top1", "SOLVER.OPTIMIZER.NAME", "Adam"),
        *("SOLVER.NESTEROV", False, "LOG.WRITERS", ["json"]),
    ]


@pytest.fixture(scope="module")
def saved(job, tmp_path_factory):
    """The state of a checkpoint in the middle of a run."""
    folder = tmp_path_factory.mktemp("run")
    DefaultTrainer(tiny_cfg(folder, *job)).train()
    return torch.load(folder / "model_0000001.pth", weights_only=True)


def put(state, path, value):
    """A copy of nested containers with another value at a path."""
    key, _, rest = path.partition(".")
    if isinstance(state, list):
        place = int(key)
        return [
            *state[:place],
            put(state[place], rest, value) if rest else value,
            *state[place + 1 :],
        ]
    key = int(key) if key.isdecimal() else key
    return {**state, key: put(state[key], rest, value) if rest else value}


def write(state, folder):
    torch.save(state, folder / "model_0000001.pth")
    (folder / "last_checkpoint").write_text("model_0000001.pth")


@pytest.mark.parametrize(("path", "value", "message"), ODD, ids=[path for path, _, _ in ODD])
def test_an_odd_entry_is_one_message_with_the_file_and_the_entry(
    path, value, message, job, saved, tmp_path
):
    write(put(saved, f"trainer.{path}", value), tmp_path)
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *job))
    with pytest.raises(CheckpointError, match=rf"model_0000001\.pth'.*{message}"):
        trainer.resume_or_load()


def test_the_checkpoint_of_these_tests_can_be_resumed(job, saved, tmp_path):
    write(put(saved, "trainer.hooks.EvalHook.evaluated_iters", 0), tmp_path)
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *job))
    trainer.resume_or_load()
    trainer.train()
    assert trainer.status == "finished"


def test_an_odd_state_of_a_writer_ends_the_start_of_the_training_with_one_message(
    job, saved, tmp_path
):
    write(put(saved, "trainer.hooks.PeriodicWriter.writers.0.state.length", "x"), tmp_path)
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *job))
    trainer.resume_or_load()
    with pytest.raises(CheckpointError, match="writer 'JSONWriter' does not fit.*length .*got 'x'"):
        trainer.train()


def test_a_tag_that_is_a_folder_or_a_pipe_is_one_message(job, tmp_path):
    tag = tmp_path / "last_checkpoint"
    tag.mkdir()
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *job))
    with pytest.raises(CheckpointError, match=r"cannot read '.*last_checkpoint': Is a directory"):
        trainer.resume_or_load()
    tag.rmdir()
    with (
        pipe_with_a_writer(tag),
        pytest.raises(CheckpointError, match="last_checkpoint': it is a pipe"),
    ):
        trainer.resume_or_load()


@contextmanager
def pipe_with_a_writer(path):
    """A pipe that a thread opens to write nothing: to read it is to read an empty file."""
    os.mkfifo(path)
    thread = threading.Thread(target=lambda: open(path, "wb").close())
    thread.start()
    yield
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    thread.join()
    os.close(reader)


def test_a_pipe_as_a_config_or_a_checkpoint_is_an_error_and_is_not_waited_for(job, tmp_path):
    with (
        pipe_with_a_writer(tmp_path / "pipe.yaml"),
        pytest.raises(ConfigError, match="pipe.yaml': it is a pipe.*write it to a file"),
    ):
        get_cfg().merge_from_file(str(tmp_path / "pipe.yaml"))
    weights = tmp_path / "pipe.pth"
    trainer = DefaultTrainer(tiny_cfg(tmp_path, *job, "MODEL.WEIGHTS", str(weights)))
    with pipe_with_a_writer(weights), pytest.raises(CheckpointError, match="it is a pipe"):
        trainer.resume_or_load(resume=False)


def test_names_of_a_checkpoint_do_not_send_control_characters_to_the_terminal(
    job, saved, tmp_path, capsys
):
    evil = "\x1b[2J\x07weight"
    setup_logger(stdout_level="INFO")
    model = {**saved["model"], evil: torch.ones(1)}
    torch.save({"model": model}, tmp_path / "weights.pth")
    cfg = tiny_cfg(tmp_path, *job, "MODEL.WEIGHTS", str(tmp_path / "weights.pth"))
    DefaultTrainer(cfg).resume_or_load(resume=False)
    with pytest.raises(SystemExit, match="^2$"), user_errors_exit():
        raise CheckpointError(f"no entry {evil}")

    captured = capsys.readouterr()
    assert r"weights of the checkpoint: \x1b[2J\x07weight" in captured.out
    assert captured.err == r"error: no entry \x1b[2J\x07weight" + "\n"
    assert not set(captured.out) & {"\x1b", "\x07"}


def test_temporary_files_of_a_killed_process_go_also_if_checkpoints_have_another_folder(tmp_path):
    for folder in ("out", "checkpoints"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ".config.yaml.0123abcd.trainkit-tmp").touch()
    cfg = tiny_cfg(tmp_path / "out", "CHECKPOINT.DIR", str(tmp_path / "checkpoints"))
    default_setup(cfg, default_argument_parser().parse_args([]))
    assert not list(tmp_path.rglob("*trainkit-tmp"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-machines", "2"], "dist_url: got 'auto'; accepted: tcp://HOST:PORT"),
        (["--num-machines", "2", "--dist-url", "tcp://host:x"], "dist_url: got 'tcp://host:x'"),
        (["--num-machines", "0"], "num_machines: got 1, 0 and 0"),
        (["--machine-rank", "1"], "num_machines: got 1, 1 and 1"),
        (["--num-gpus", "-1"], "num_machines: got -1, 0 and 1"),
    ],
)
def test_options_that_cannot_start_a_run_are_one_line_and_code_2(options, message, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        default_argument_parser().parse_args(options)
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert message in printed
    assert printed.count("\n") == 1
