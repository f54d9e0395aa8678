"""configurable: called with a config or with arguments; IMPORTS: dotted module names."""

import sys

import pytest

from trainkit.config import ConfigError, configurable, get_cfg, import_modules


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
    assert Net(cfg).args == Net(cfg=cfg).args == (8, 2, "Net")
    assert Net(cfg, depth=5).args == (8, 5, "Net")
    assert Net(cfg, width=5, name="b").args == (5, 2, "b")  # they win over the config
    assert Narrow(cfg).args == (1, 2, "Narrow")


def test_a_function_takes_a_config_or_its_own_arguments(cfg):
    assert build(3, depth=1) == (3, 1)
    assert build(cfg) == (8, 2)
    assert build(cfg=cfg, depth=4) == (8, 4)
    assert build(cfg, scale=2) == (16, 2)  # an argument that from_config knows
    assert build(cfg, 2, depth=1) == (16, 1)
    assert build.__name__ == "build"
    assert build.__doc__ == "Build."

    @configurable(from_config=lambda cfg, **kwargs: {"seen": kwargs})
    def build_any(seen):
        return seen

    assert build_any(cfg, a=1, b=2) == {"a": 1, "b": 2}


def test_a_class_without_a_class_method_from_config_is_refused_with_what_is_missing(cfg):
    class NoMethod:
        @configurable
        def __init__(self, a=1): ...

    class PlainMethod(NoMethod):
        def from_config(self, cfg): ...

    class StaticMethod(NoMethod):
        @staticmethod
        def from_config(cfg): ...

    class OtherName(NoMethod):
        @classmethod
        def from_config(cls, config): ...

    class NoParameter(NoMethod):
        @classmethod
        def from_config(cls): ...

    class Inherits(Net):
        pass

    for arguments in ({"a": 1}, {"cfg": cfg}):
        with pytest.raises(AttributeError, match="NoMethod has no from_config; .* class method"):
            NoMethod(**arguments)
        for refused in (PlainMethod, StaticMethod):
            with pytest.raises(TypeError, match=f"{refused.__name__}.from_config must be a class"):
                refused(**arguments)
    for refused in (OtherName, NoParameter):
        assert isinstance(refused(a=1), refused)
        with pytest.raises(TypeError, match=f"{refused.__name__}.from_config must be cfg, got"):
            refused(cfg)
    assert Inherits(cfg).args == (8, 2, "Inherits")


def test_a_function_needs_a_from_config_whose_first_parameter_is_cfg(cfg):
    with pytest.raises(TypeError, match=r"got .*plain; write @configurable\(from_config="):

        @configurable
        def plain(width): ...

    @configurable(from_config=lambda config: {"width": 1})
    def other_name(width):
        return width

    assert other_name(3) == 3
    with pytest.raises(TypeError, match=r"first parameter of .*lambda.* must be cfg, got \(config"):
        other_name(cfg)


def test_modules_are_imported_and_one_that_cannot_be_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imports_first.py").write_text("import imports_second")
    (tmp_path / "imports_second.py").write_text("")
    (tmp_path / "imports_broken.py").write_text("1 / 0")
    import_modules(["imports_first"])
    assert {"imports_first", "imports_second"} <= set(sys.modules)
    with pytest.raises(
        ConfigError, match=r"IMPORTS: got 'imports_broken' .*ZeroDivisionError: division"
    ) as error:
        import_modules(["imports_second", "imports_broken"])
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    for name in ["imports_gone", "a/b.py", ".a", "", 3]:
        with pytest.raises(
            ConfigError, match=f"IMPORTS: got {name!r} .*; accepted: a module such as"
        ):
            import_modules([name])
