import pytest

from trainkit.checkpoint.folder import mirrors


@pytest.fixture(autouse=True)
def no_mirror_is_left():
    """A run that a test breaks off goes on copying its files otherwise, also after saves of other tests."""
    yield
    mirrors.clear()
