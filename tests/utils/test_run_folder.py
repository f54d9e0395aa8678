"""Two runs never own the same folder."""

import signal
import subprocess
import sys
from argparse import Namespace
from functools import partial

import pytest

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError
from trainkit.engine import DefaultTrainer, default_setup
from trainkit.utils import run_folder
from trainkit.utils.run_folder import is_owned, is_owned_by_another, own_folder, release_folder

OWN = (
    "import sys, time; from trainkit.utils.run_folder import own_folder; own_folder(sys.argv[1]); "
    "print('owned', flush=True); time.sleep(600)"
)


@pytest.fixture(autouse=True)
def released(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_PATIENCE_SEC", 0.1)
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
            assert (is_owned_by_another(tmp_path), is_owned(tmp_path)) == (True, False)
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
        assert (is_owned(tmp_path), is_owned_by_another(tmp_path)) == (True, False)
        release_folder(tmp_path)
        release_folder(tmp_path)
        assert not is_owned(tmp_path)
        assert list(tmp_path.iterdir()) == []
