"""Keys as attributes: completion shows them, and a wrong one names its neighbour."""

import pytest

from trainkit.config import get_cfg
from trainkit.engine import hooks


def test_dir_shows_the_keys_of_a_node_and_the_names_that_projects_lend():
    cfg = get_cfg()
    assert {"BASE_LR", "MAX_ITER", "AMP"} <= set(dir(cfg.SOLVER))
    assert "clone" in dir(cfg)
    assert {"EvalHook", "EMAHook"} <= set(dir(hooks))


def test_a_wrong_key_as_an_attribute_names_its_neighbour():
    cfg = get_cfg()
    with pytest.raises(AttributeError, match=r"no key 'BASE_LRR'\. .*BASE_LR\b"):
        _ = cfg.SOLVER.BASE_LRR
    assert not hasattr(cfg, "__array__")
    with pytest.raises(AttributeError) as caught:
        _ = hooks.EMAHok
    assert caught.value.name == "EMAHok"
    assert caught.value.obj == hooks
