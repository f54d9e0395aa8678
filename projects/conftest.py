"""The fixtures and settings of the tests of trainkit, for those of the projects."""

from tests.conftest import *  # noqa: F403
