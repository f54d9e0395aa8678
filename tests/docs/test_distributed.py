"""What docs/distributed.md names is there."""

import re
from pathlib import Path

from trainkit.config import get_cfg

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text()


def test_every_key_that_is_named_is_there():
    names = set(re.findall(r"`([A-Z][A-Z_]+(?:\.[A-Z_]+)+)", PAGE))
    assert {"MODEL.PARALLEL", "SOLVER.REFERENCE_WORLD_SIZE", "MODEL.DDP.COMPRESSION"} <= names
    for name in names:
        node = get_cfg()
        for key in name.split("."):
            assert key in node, name
            node = node[key]


def test_every_option_is_told():
    for part in ("DDP", "FSDP"):
        for key in get_cfg().MODEL[part]:
            assert f"`{key}`" in PAGE
