"""What docs/distributed.md names is there."""

from pathlib import Path

from tests.docs.keys import keys_named_in
from trainkit.config import get_cfg

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/distributed.md").read_text()


def test_every_key_that_is_named_is_there():
    assert {"MODEL.PARALLEL", "SOLVER.REFERENCE_WORLD_SIZE", "MODEL.DDP.COMPRESSION"} <= keys_named_in(PAGE)


def test_every_option_is_told():
    for part, page in (("DDP", PAGE), ("FSDP", (ROOT / "projects/sharding/README.md").read_text())):
        for key in getattr(get_cfg().MODEL, part):
            assert f"`{key}`" in page
