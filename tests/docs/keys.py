"""The keys of a config that a page of the documentation names."""

import re

from trainkit.config import get_cfg


def keys_named_in(page):
    """All of them, in backquotes with a dot; each is there."""
    names = set(re.findall(r"`([A-Z][A-Z_]+(?:\.[A-Z_]+)+)", page))
    for name in names:
        node = get_cfg()
        for key in name.split("."):
            assert hasattr(node, key), name  # not "in": a project may declare it
            node = getattr(node, key)
    return names
