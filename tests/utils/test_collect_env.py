"""The table of a bug report."""

import platform
import runpy
import sys

import numpy as np
import torch

import trainkit
from trainkit.utils.collect_env import collect_env_info


def test_the_table_names_versions_and_hardware():
    rows = dict(line.split(maxsplit=1) for line in collect_env_info().splitlines() if line[0] != "-")
    assert rows["platform"] == platform.platform()
    assert rows["torch"].startswith(torch.__version__)
    assert rows["numpy"] == np.__version__
    assert rows["trainkit"].startswith(trainkit.__version__)
    assert {"python", "fvcore", "CPU", "CUDA"} <= set(rows)


def test_it_is_a_command(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "trainkit.utils.collect_env")
    runpy.run_module("trainkit.utils.collect_env", run_name="__main__")
    assert capsys.readouterr().out == collect_env_info() + "\n"
