"""Without a GPU, `test_run.py` starts the other tests of this folder; some look into the fake device."""

import sys

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_on_*.py"]
if "tests.fake_cuda.device" not in sys.modules:
    collect_ignore_glob.append("test_on_waits.py")
