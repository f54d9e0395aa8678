"""A job of SLURM that is told to stop asks to be requeued, and then continues by itself."""

import atexit
import os
import signal
from argparse import Namespace
from functools import partial

import pytest

from tests.engine.job import tiny_cfg
from tests.engine.tiny import AfterStep
from tests.exactness.machine import content
from trainkit.engine import DefaultTrainer, default_setup
from trainkit.utils.logger import close_logger

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no SIGUSR1")


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Of job 42: the file with the commands that a stand-in of scontrol has got; while ``refuse`` exists, it fails."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(
        f"#!/bin/sh\ncd {folder}\necho \"$@\" >> asked\nif [ -e refuse ]; then echo 'no such job' >&2; exit 1; fi\n"
    )
    (folder / "scontrol").chmod(0o755)
    (folder / "asked").touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setattr(
        atexit, "register", lambda call, *args: AT_EXIT.append(partial(call, *args))
    )
    AT_EXIT.clear()
    return folder / "asked"


AT_EXIT = []  # what the end of the process would call


def start(folder, *options, signum=None, resume=False):
    """A start of the job; returns the exit code. After four iterations it gets a signal."""
    cfg = tiny_cfg(folder, *options)
    default_setup(cfg, Namespace(resume=resume))
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    if signum is not None:
        trainer.register_hooks(
            [AfterStep(lambda trainer: trainer.iter == 3 and os.kill(os.getpid(), signum))]
        )
    try:
        trainer.train()
    except SystemExit as exit:
        return exit.code
    finally:
        for call in AT_EXIT:
            call()
        close_logger()
    return 0


@pytest.mark.parametrize(("name", "code"), [("SIGUSR1", 138), ("SIGTERM", 143)])
def test_a_job_that_was_told_to_stop_is_requeued_and_ends_with_the_bits_of_a_whole_run(
    tmp_path, asked, name, code
):
    assert start(tmp_path / "whole") == 0
    options = ("REQUEUE_SIGNAL", name)
    assert start(tmp_path / "run", *options, signum=signal.Signals[name]) == code
    AT_EXIT.clear()
    assert start(tmp_path / "run", *options, resume=True) == 0
    assert asked.read_text() == "requeue 42\n"
    log = (tmp_path / "run/log.txt").read_text()
    assert "The SLURM job 42 is requeued" in log
    (files, lines), (expected_files, expected_lines) = (
        content(tmp_path / "run"),
        content(tmp_path / "whole"),
    )
    assert files["model_final.pth"] == expected_files["model_final.pth"]
    assert lines == expected_lines


def test_a_job_that_slurm_does_not_requeue_says_why_and_without_the_key_nobody_asks(
    tmp_path, asked
):
    assert start(tmp_path / "one", signum=signal.SIGUSR1) == 138
    assert asked.read_text() == ""
    (asked.parent / "refuse").touch()
    assert start(tmp_path / "two", "REQUEUE_SIGNAL", "SIGUSR1", signum=signal.SIGUSR1) == 138
    assert "The SLURM job 42 is not requeued: no such job" in (tmp_path / "two/log.txt").read_text()
