"""Files are read and written as UTF-8, whatever the locale is."""

import os
import subprocess
import sys

from tests.capability_names import ROOT

JOB = r"""
import sys
from trainkit.config import get_cfg
from trainkit.engine import default_setup
from tests.engine.job import tiny_cfg
from trainkit.engine import DefaultTrainer
from types import SimpleNamespace

cfg = tiny_cfg(sys.argv[1], "SOLVER.MAX_ITER", 2)
cfg.MODEL.COMMENT = "gr\u00f6\u00dfer"
default_setup(cfg, SimpleNamespace(resume=False))
DefaultTrainer(cfg).train()
again = get_cfg()
again.MODEL.COMMENT = ""
again.merge_from_file(sys.argv[1] + "/config.yaml")
assert again.MODEL.COMMENT == "gr\u00f6\u00dfer", ascii(again.MODEL.COMMENT)
"""


def test_a_run_with_a_name_that_is_not_ascii_works_in_a_locale_that_has_only_ascii(tmp_path):
    command = [sys.executable, "-X", "utf8=0", "-c", JOB, str(tmp_path)]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "größer" in (tmp_path / "log.txt").read_text(encoding="utf-8")
