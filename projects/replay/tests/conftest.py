"""The tests of replay run as if a file had been started, also in a process of xdist, which is ``python -c``."""

import sys

import pytest


@pytest.fixture(autouse=True, scope="package")
def started_from_a_file():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("__main__.__file__", __file__, raising=False)
        patch.setattr(sys, "argv", [__file__])
        yield
