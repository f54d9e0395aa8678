"""The names of the README are found."""

from tests.docs.pages import blocks

(NAMES,) = blocks("projects/compat/README.md", "python")


def test_every_name_is_there():
    exec(NAMES, {})
