"""Configs written in Python: loading, relative imports, overrides, saving, and making the calls they describe."""

import math
from dataclasses import dataclass
from fractions import Fraction

import pytest
from omegaconf import DictConfig, OmegaConf

from trainkit.config import ConfigError, LazyCall, LazyConfig, instantiate


@pytest.fixture
def write(tmp_path):
    """Write files by their names; the path of the first one."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return tmp_path / f"{next(iter(files)).replace('__', '/')}.py"

    return write


@dataclass
class Point:
    x: int
    y: int = 0


def fail(error):
    raise error("no")


def load_yaml(tmp_path, text):
    (tmp_path / "cfg.yaml").write_text(text)
    return LazyConfig.load(tmp_path / "cfg.yaml")


# ---------------------------------------------------------------------- loading Python


def test_a_file_gives_its_nodes_and_nothing_else(write):
    cfg = LazyConfig.load(write(a="import math\nmodel = dict(width=3, at=[1, (2, 3)])\n_private = {}\nnumber = 1"))
    assert isinstance(cfg, DictConfig)
    assert cfg == {"model": {"width": 3, "at": [1, [2, 3]]}}
    assert cfg.model.at[1][0] == 2


def test_files_import_from_each_other_relatively(write):
    path = write(
        jobs__job="from ..base import train\nfrom .parts import *\nmodel.steps += 1\n"
        "from ..parts.data import loader as data\n",
        jobs__parts="from ..base import train as _train\nmodel = dict(steps=_train.steps)\nwidth = 3",
        base="train = dict(steps=10)",
        parts__data="import math\nloader = dict(size=math.floor(2.5))",
    )
    assert LazyConfig.load(path) == {"train": {"steps": 10}, "model": {"steps": 11}, "data": {"size": 2}}


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"a": "from .b import x"}, ImportError, "the relative import from .*b.py does not exist"),
        ({"a": "from . import b", "b": ""}, ImportError, "write from .file import name"),
        ({"a": "from .b import x", "b": ""}, ImportError, "cannot import name 'x'"),
        (
            {"a": "from .b import x", "b": "from .a import y"},
            ConfigError,
            "itself: [^>]*a.py -> [^>]*b.py -> [^>]*a.py$",
        ),
        ({"a": "x = dict(\n"}, SyntaxError, "a.py"),
        ({"a": "from .b import x", "b": "1 / 0"}, ZeroDivisionError, "division"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(write, files, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        LazyConfig.load(write(**files))


@pytest.mark.parametrize("name", ["missing.py", "missing.yaml", "cfg.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(ConfigError, match=name):
        LazyConfig.load(tmp_path / name)


# ---------------------------------------------------------------------- nothing is patched


# ---------------------------------------------------------------------- calls


def test_instantiate_makes_the_inner_calls_first_and_passes_plain_values():
    inner = LazyCall(Point)(x=1, y=2)
    node = LazyCall(dict)(point=inner, many=[inner, {"deep": inner}], at=(1, [2]), number=3)
    made = instantiate(node)
    assert made == {"point": Point(1, 2), "many": [Point(1, 2), {"deep": Point(1, 2)}], "at": [1, [2]], "number": 3}
    assert [type(made["many"]), type(made["many"][1]), type(made["at"][1])] == [list, dict, list]
    assert node.point == inner  # it stays a description


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "test_lazy_config.Piont", "x": 1}, r"Piont\(x\) failed: .* has no attribute 'Piont'"),
        ({"_target_": "math.pi", "x": 1}, r"math.pi\(x\) failed: .* not callable"),
        ({"_target_": Point, "x": 1, "z": 2}, r"test_lazy_config.Point\(x, z\) failed: TypeError: .*'z'"),
        ({"_target_": fail, "error": ValueError}, r"test_lazy_config.fail\(error\) failed: ValueError: no"),
    ],
)
def test_what_is_wrong_with_a_call_is_said_with_its_target_and_arguments(node, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        instantiate({"outer": [node]})


# ---------------------------------------------------------------------- overrides


def overridden(*overrides):
    cfg = OmegaConf.create({"model": {"width": 3, "act": None}, "hooks": [{"period": 1}], "name": "a"})
    assert LazyConfig.apply_overrides(cfg, overrides) is cfg
    return cfg


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("5", 5), ("1e-3", 0.001), ("true", True), ("null", None), ("None", None), ("text", "text"), ("'5'", "5")),
        *(("[1, a]", [1, "a"]), ("(1, 2)", [1, 2]), ("{a: 1}", {"a": 1}), ("a=b", "a=b"), ("", ""), ("${name}", "a")),
    ],
)
def test_an_override_is_read_as_a_value(text, value):
    assert overridden(f"model.width={text}").model.width == value


def test_overrides_reach_into_lists_merge_nodes_and_come_in_their_order():
    cfg = overridden("hooks.0.period=5", "model={width: 4}", "+model.depth=2", "++model.new.deep=1", "model.depth=3")
    assert cfg == {
        "model": {"width": 4, "act": None, "depth": 3, "new": {"deep": 1}},
        "hooks": [{"period": 5}],
        "name": "a",
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.wdith=5", "there is no 'model.wdith'; did you mean 'width'?"),
        ("modle.width=5", "there is no 'modle'; did you mean 'model'?"),
        ("~model.width=5", "there is no '~model'"),
        ("name.first=5", "name.first: 'a' is neither a node"),
        ("hooks.1.period=5", "hooks.1: .* long enough list"),
        ("model.width", "overrides are written key=value, such as model.width=32, got 'model.width'"),
        ("=5", "overrides are written key=value"),
        ("model..width=5", "overrides are written key=value"),
    ],
)
def test_what_is_wrong_with_an_override_is_said(override, message):
    with pytest.raises(ConfigError, match=message):
        overridden(override)


# ---------------------------------------------------------------------- saving


def test_what_is_saved_loads_again_to_an_equal_config(write, tmp_path):
    cfg = LazyConfig.load(
        write(
            a="from trainkit.config import LazyCall as L\nfrom test_lazy_config import Point\n"
            "train = dict(seed=1, lr=1e-3, big=1e30, name='1e-3', none=None, flag=True, yes='yes', day='2026-01-01')\n"
            "points = dict(one=L(Point)(x='${train.seed}', y=(1, 2)), many=[L(Point)(x='${.y}', y='a: b')])\n"
            "points['one'].x2 = (3, [4])\npoints['late'] = dict(_target_=Point, x=1, y='???')"
        )
    )
    LazyConfig.save(cfg, tmp_path / "saved.yaml")
    loaded = LazyConfig.load(tmp_path / "saved.yaml")
    assert OmegaConf.to_container(loaded) == OmegaConf.to_container(cfg)
    assert OmegaConf.to_container(loaded, resolve=True) == OmegaConf.to_container(cfg, resolve=True)
    assert loaded.points.late["_target_"] == "test_lazy_config.Point"
    assert [type(value) for value in loaded.train.values()] == [int, float, float, str, type(None), bool, str, str]
    assert list(loaded) == list(cfg) == ["train", "points"]
    loaded.train.lr = 2e-3
    assert OmegaConf.to_container(loaded) != OmegaConf.to_container(cfg)


def test_loading_a_saved_config_runs_and_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "lazy_test_bomb.py").write_text("raise SystemExit('it went off')")
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = load_yaml(tmp_path, "model: {_target_: lazy_test_bomb.Model, width: 1}")
    assert cfg.model["_target_"] == "lazy_test_bomb.Model"
    LazyConfig.apply_overrides(cfg, ["model.width=2"])
    with pytest.raises(SystemExit, match="it went off"):  # it is there, and this is what resolves it
        instantiate(cfg.model)


def test_of_what_yaml_cannot_hold_only_the_name_is_saved_with_a_warning(tmp_path, caplog):
    cfg = {"call": LazyCall(dict)(floor=math.floor, act=lambda x: x, number=Fraction(1, 2), width=3)}
    LazyConfig.save(cfg, tmp_path / "saved.yaml")
    assert "call.floor is math.floor; call.act is test_lazy_config" in caplog.text
    saved = LazyConfig.load(tmp_path / "saved.yaml").call
    assert (saved["_target_"], saved.floor, saved.width) == ("builtins.dict", "math.floor", 3)


# ---------------------------------------------------------------------- as Python


def test_a_config_is_shown_as_lines_of_python():
    point = LazyCall(Point)(x="${train.seed}", y=[1, {"a": LazyCall("math.floor")(x=2.5)}])
    cfg = OmegaConf.create({"train": {"seed": 7, "name": "a", "none": {}}, "point": point})
    assert LazyConfig.to_py(cfg).splitlines() == [
        "cfg.train.seed = 7",
        "cfg.train.name = 'a'",
        "cfg.train.none = {}",
        "cfg.point = test_lazy_config.Point(x=7, y=[1, {'a': math.floor(x=2.5)}])",
    ]
    assert LazyConfig.to_py(LazyCall("a.B")(c=1), prefix="model.") == "model = a.B(c=1)"


# ---------------------------------------------------------------------- without omegaconf
