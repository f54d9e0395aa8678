"""The tests of this folder that look into the device run on the fake one only: `test_run.py` starts them."""

import sys

collect_ignore_glob = [] if "tests.fake_cuda.device" in sys.modules else ["test_on_*.py"]
