"""The fixtures of the tests of the engine."""

from tests.engine.conftest import *  # noqa: F403
