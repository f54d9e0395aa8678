"""Two runs never own the same folder."""

import errno
import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import pytest

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer, default_setup
from trainkit.utils import run_folder
from trainkit.utils.logger import close_logger
from trainkit.utils.run_folder import (
    LOCK_FILE,
    is_owned,
    is_owned_by_another,
    own_folder,
    release_folder,
)

OWN = (
    "import sys, time; from trainkit.utils.run_folder import own_folder; own_folder(sys.argv[1]); "
    "print('owned', flush=True); time.sleep(600)"
)

# with a forked process that outlives it
OWN_AND_FORK = """
import os, sys, time
from trainkit.utils.run_folder import is_owned, own_folder
own_folder(sys.argv[1])
forked = os.fork()
if forked == 0:
    print("owned" if is_owned(sys.argv[1]) else "not owned", os.getpid(), flush=True)
time.sleep(600)
"""
# the same with a worker of a loader, in a run
TRAIN_WITH_A_WORKER = """
import os, sys
from argparse import Namespace
from torch.utils.data import DataLoader
from tests.engine.job import tiny_cfg
from trainkit.engine import default_setup


class Samples(list):
    def __getitem__(self, index):
        print("not owned", os.getpid(), flush=True)
        os.read(0, 1)


default_setup(tiny_cfg(sys.argv[1]), Namespace())
next(iter(DataLoader(Samples([0]), num_workers=1, multiprocessing_context="fork")))
"""


@pytest.fixture(autouse=True)
def released(tmp_path, monkeypatch):
    fast_clock = SimpleNamespace(monotonic=lambda: 20 * time.monotonic(), sleep=time.sleep)
    monkeypatch.setattr(run_folder, "time", fast_clock)  # the wait for a folder ends sooner
    yield
    release_folder(tmp_path)
    release_folder(tmp_path / "own")


def test_a_second_process_is_refused_before_it_touches_anything_and_gets_the_folder_after_a_kill(
    tmp_path,
):
    assert not is_owned_by_another(tmp_path)
    cfgs = {
        key: tiny_cfg(tmp_path / "own", key, str(tmp_path))
        for key in ("OUTPUT_DIR", "CHECKPOINT.DIR")
    }
    with subprocess.Popen(
        [sys.executable, "-c", OWN, tmp_path], stdout=subprocess.PIPE, text=True
    ) as owner:
        try:
            assert owner.stdout.readline() == "owned\n"
            with pytest.raises(OSError, match=f"{tmp_path.name}' belongs to another run"):
                own_folder(tmp_path)
            for key, cfg in cfgs.items():
                message = f"{key} .* cannot be written, choose another: .* belongs to another run"
                for start in (partial(default_setup, cfg, Namespace()), DefaultTrainer(cfg).train):
                    with pytest.raises(ConfigError, match=message):
                        start()
            assert is_owned_by_another(tmp_path)
            assert not is_owned(tmp_path)
        finally:
            owner.send_signal(signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["run.lock"]
    assert not is_owned_by_another(tmp_path)
    own_folder(tmp_path)
    assert is_owned(tmp_path)


def test_the_same_process_owns_it_once_under_any_path_and_releases_it(tmp_path):
    for _ in range(2):
        own_folder(f"{tmp_path}/../{tmp_path.name}")
        own_folder(tmp_path)
        assert is_owned(tmp_path)
        assert not is_owned_by_another(tmp_path)
        release_folder(tmp_path)
        release_folder(tmp_path)
        assert not is_owned(tmp_path)
        assert list(tmp_path.iterdir()) == []


def free_for_another_process(folder):
    """Whether another process gets the lock; it takes it, and ends."""
    code = "import sys; from trainkit.utils.run_folder import is_owned_by_another as f; print(f(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True)
    return done.stdout == "False\n"


def test_the_lock_stays_when_the_process_opens_and_closes_the_file(tmp_path):
    own_folder(tmp_path / "own")
    shutil.copytree(tmp_path / "own", tmp_path / "copy")
    with open(tmp_path / "own" / LOCK_FILE) as file:
        file.read()
    assert not free_for_another_process(tmp_path / "own")
    release_folder(tmp_path / "own")
    assert not (tmp_path / "own" / LOCK_FILE).exists()


@pytest.mark.parametrize(
    "code", [OWN_AND_FORK, pytest.param(TRAIN_WITH_A_WORKER, marks=pytest.mark.slow)]
)
def test_a_process_that_a_killed_run_has_forked_does_not_keep_the_folder(tmp_path, code):
    command = [sys.executable, "-c", code, tmp_path / "own"]
    forked = None
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        try:
            lines = iter(owner.stdout.readline, "")
            forked = next(line for line in lines if "owned" in line)
            assert forked.startswith("not owned")
            assert is_owned_by_another(tmp_path / "own")
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait()
        process = int(forked.split()[-1])
        os.kill(process, 0)  # it lives
        default_setup(tiny_cfg(tmp_path / "own"), Namespace(resume=True))
        close_logger()
        assert is_owned(tmp_path / "own")
        os.kill(process, signal.SIGKILL)


def test_a_forked_process_leaves_the_lock_and_its_file_to_its_parent(tmp_path):
    own_folder(tmp_path / "own")
    # a process that is forked by multiprocessing runs what Python registers for a fork, as here
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process may have threads
        process = context.Process(target=release_folder, args=[tmp_path / "own"])
        process.start()
    process.join()
    assert (tmp_path / "own" / LOCK_FILE).exists()
    assert not free_for_another_process(tmp_path / "own")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog, number):
    def refuse(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    own_folder(tmp_path / "own")
    assert is_owned(tmp_path / "own")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{tmp_path / 'own'}' has no locks ({os.strerror(number)})" in record.getMessage()


def test_another_error_of_the_lock_is_an_error(tmp_path, monkeypatch):
    def fail(descriptor, operation):
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="the disk is broken"):
        own_folder(tmp_path / "own")
    assert not is_owned(tmp_path / "own")
