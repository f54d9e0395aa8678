"""configurable: called with a config or with arguments."""

import pytest

from trainkit.config import CfgNode, configurable, get_cfg


class Net:
    @configurable
    def __init__(self, width, depth=2, *, name="net"):
        self.args = (width, depth, name)

    @classmethod
    def from_config(cls, cfg):
        return {"width": cfg.MODEL.WIDTH, "name": cls.__name__}


class Narrow(Net):
    @classmethod
    def from_config(cls, cfg):
        return super().from_config(cfg) | {"width": 1}


@configurable(from_config=lambda cfg, scale=1: {"width": cfg.MODEL.WIDTH * scale})
def build(width, depth=2):
    """Build."""
    return width, depth


@pytest.fixture
def cfg():
    cfg = get_cfg()
    cfg.MODEL.WIDTH = 8
    return cfg


def test_a_class_takes_a_config_or_its_own_arguments(cfg):
    assert Net(3).args == (3, 2, "net")
    assert Net(width=3, depth=1, name="a").args == (3, 1, "a")
    assert Net(cfg).args == (8, 2, "Net")
    assert Net(cfg=cfg).args == (8, 2, "Net")


def test_further_arguments_win_over_the_config(cfg):
    assert Net(cfg, depth=5).args == (8, 5, "Net")
    assert Net(cfg, width=5, name="b").args == (5, 2, "b")


def test_a_subclass_may_override_from_config_alone(cfg):
    assert Narrow(cfg).args == (1, 2, "Narrow")


def test_a_function_takes_a_config_or_its_own_arguments(cfg):
    assert build(3, depth=1) == (3, 1)
    assert build(cfg) == (8, 2)
    assert build(cfg=cfg, depth=4) == (8, 4)
    assert (build.__name__, build.__doc__) == ("build", "Build.")


def test_arguments_that_from_config_knows_go_there(cfg):
    assert build(cfg, scale=2) == (16, 2)
    assert build(cfg, 2, depth=1) == (16, 1)


def test_from_config_with_keywords_takes_all_of_them(cfg):
    @configurable(from_config=lambda cfg, **kwargs: {"seen": kwargs})
    def build_any(seen):
        return seen

    assert build_any(cfg, a=1, b=2) == {"a": 1, "b": 2}


def test_a_class_without_from_config_says_what_to_add():
    class Bare:
        @configurable
        def __init__(self, a):
            self.a = a

    for argument in (1, CfgNode()):
        with pytest.raises(AttributeError, match=r"Bare needs a @classmethod from_config"):
            Bare(argument)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: configurable(lambda a: a), "is for an __init__"),
        (lambda: configurable(from_config=lambda cfg: {})(Net), "from_config=... for a function"),
    ],
)
def test_misuse_is_a_type_error_that_says_what_to_do(use, message):
    with pytest.raises(TypeError, match=message):
        use()
