"""Configs written in Python: loading, relative imports, overrides, saving, and making the calls they describe."""

import dataclasses
import itertools
import math
import re
from collections import OrderedDict
from fractions import Fraction

import cloudpickle
import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from trainkit.config import ConfigError, LazyCall, LazyConfig, configurable, instantiate
from trainkit.utils.registry import locate


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


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0
    area: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        self.area = self.x * self.y if isinstance(self.y, int) else 0


class Mapped(dict):
    pass


class Thing:
    def __init__(self, **arguments):
        vars(self).update(arguments)

    def __call__(self, more):
        return self.number + more

    @classmethod
    def make(cls): ...


def fail(error):
    raise error("no")


def reloaded(cfg, folder):
    LazyConfig.save(cfg, folder / "saved.yaml")
    return LazyConfig.load(folder / "saved.yaml")


def test_a_file_gives_its_nodes_and_nothing_else(write):
    path = write(a="import math\nmodel = dict(width=3, at=[1, (2, 3)])\n_private = {}\nnumber = 1")
    cfg = LazyConfig.load(path)
    assert isinstance(cfg, DictConfig)
    assert cfg == {"model": {"width": 3, "at": [1, [2, 3]]}}
    assert LazyConfig.load(path, "number") == 1
    assert LazyConfig.load(path, ["number", "model"]) == (1, {"width": 3, "at": [1, [2, 3]]})
    with pytest.raises(ConfigError, match="has no 'modle'; did you mean 'model'"):
        LazyConfig.load(path, "modle")


def test_files_import_from_each_other_relatively_and_each_has_its_own_copy(write):
    path = write(
        jobs__job="from ..base import train\nfrom .parts import *\nmodel.steps += 1\ntrain.steps = 20\n"
        "from ..parts.data import loader as data\n",
        jobs__parts="from ..base import train as _train\nmodel = dict(steps=_train.steps)\nwidth = 3",
        base="train = dict(steps=10)",
        parts__data="import math\nloader = dict(size=math.floor(2.5))",
    )
    assert LazyConfig.load(path) == {
        "train": {"steps": 20},
        "model": {"steps": 11},
        "data": {"size": 2},
    }


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"a": "from .b import x"}, ImportError, "the relative import from .*b.py does not exist"),
        ({"a": "from .b import x", "b": ""}, ImportError, "cannot import name 'x'"),
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


def test_instantiate_makes_the_inner_calls_first_and_passes_plain_values():
    inner = LazyCall(Point)(x=1, y=2)
    node = LazyCall(dict)(point=inner, many=[inner, {"deep": inner}], at=(1, [2]), number=3)
    made = instantiate(node)
    assert made == {
        "point": Point(1, 2),
        "many": [Point(1, 2), {"deep": Point(1, 2)}],
        "at": [1, [2]],
        "number": 3,
    }
    assert [type(made["many"]), type(made["many"][1]), type(made["at"][1])] == [list, dict, list]
    assert node.point == inner  # it stays a description


def test_the_target_of_a_call_can_be_a_call(tmp_path):
    cfg = LazyCall(LazyCall(Thing)(number=3))(more=4)
    assert instantiate(cfg) == instantiate(reloaded(cfg, tmp_path)) == 7


def test_what_describes_no_call_is_given_back():
    for thing in (5, {"x": 1}, Thing(), Point(1), math.floor, None):
        assert instantiate(thing) is thing
    assert instantiate([3, [4]]) == [3, [4]]
    assert instantiate((1, [2])) == (1, [2])


def test_dataclasses_in_nodes_come_out_as_they_were_also_after_a_save(tmp_path):
    cfg = OmegaConf.create({"width": 1}, flags={"allow_objects": True})
    cfg.model = LazyCall(Thing)(
        shapes={"res3": Point(512), "res4": Point(1024, 4)}, many=[Point(7)]
    )
    cfg.late = Point(3, 2)
    for each in (cfg, reloaded(cfg, tmp_path)):
        made = instantiate(each)
        assert made["model"].shapes == {"res3": Point(512), "res4": Point(1024, 4)}
        assert made["model"].many == [Point(7)]
        assert made["late"] == Point(3, 2)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            {"_target_": "test_lazy_config.Piont", "x": 1},
            r"Piont\(x\) failed: .* has no attribute 'Piont'",
        ),
        ({"_target_": "math.pi", "x": 1}, r"math.pi\(x\) failed: .* not callable"),
        (
            {"_target_": Point, "x": 1, "z": 2},
            r"test_lazy_config.Point\(x, z\) failed: TypeError: .*'z'",
        ),
        (
            {"_target_": fail, "error": ValueError},
            r"test_lazy_config.fail\(error\) failed: ValueError: no",
        ),
    ],
)
def test_what_is_wrong_with_a_call_is_said_with_its_target_and_arguments(node, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        instantiate({"outer": [node]})


def test_a_dotted_path_leads_to_an_attribute_and_one_to_nowhere_says_where_it_ends(
    write, monkeypatch
):
    assert locate("torch.nn.Module.forward") is torch.nn.Module.forward
    monkeypatch.syspath_prepend(
        write(located_broken="1 / 0", located_needy="import gone_module").parent
    )
    for name, message in {
        "torch.nn.Module.gone.x": "'Module' has no attribute 'gone'",
        "": "cannot locate",
        "located_broken.x": "ZeroDivisionError",
        "located_needy.x": "No module named 'gone_module'",
    }.items():
        with pytest.raises(ImportError, match=message):
            locate(name)


class Sized:
    @configurable
    def __init__(self, size, depth=2):
        self.sizes = size, depth

    @classmethod
    def from_config(cls, cfg, scale=1):
        return {"size": cfg.size * scale}


def test_a_configurable_takes_a_lazy_config_as_its_config():
    cfg = OmegaConf.create({"size": 3})
    assert Sized(cfg).sizes == (3, 2)
    assert Sized(cfg=cfg, scale=2, depth=1).sizes == (6, 1)
    assert Sized(4).sizes == (4, 2)


def overridden(*overrides):
    cfg = OmegaConf.create(
        {"model": {"width": 3, "act": None}, "hooks": [{"period": 1}], "name": "a"}
    )
    assert LazyConfig.apply_overrides(cfg, overrides) is cfg
    return cfg


def test_overrides_are_values_reach_into_lists_merge_nodes_and_come_in_their_order():
    values = {
        "1e-3": 0.001,
        "true": True,
        "null": None,
        "text": "text",
        "'5'": "5",
        "[1, a]": [1, "a"],
    }
    values |= {"(1, 2)": [1, 2], "{a: 1}": {"a": 1}, "a=b": "a=b", "": "", "${name}": "a"}
    for text, value in values.items():
        assert overridden(f"model.width={text}").model.width == value
    cfg = overridden(
        "hooks.0.period=5",
        "model={width: 4}",
        "+model.depth=2",
        "++model.new.deep=1",
        "model.depth=3",
    )
    assert cfg == {
        "model": {"width": 4, "act": None, "depth": 3, "new": {"deep": 1}},
        "hooks": [{"period": 5}],
        "name": "a",
    }


def test_a_key_that_is_like_no_other_is_made_with_a_warning(caplog):
    assert overridden("model.ema.decay=0.9").model.ema.decay == 0.9
    [text] = caplog.messages
    assert text.startswith("model.ema.decay ")
    assert "write +model.ema.decay" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.wdith=5", "there is no 'model.wdith'; did you mean 'width'?"),
        ("~model.width=5", "there is no '~model'"),
        ("name.first=5", "name.first: 'a' is neither a node"),
        ("hooks.1.period=5", "hooks.1: .* long enough list"),
        (
            "model.width",
            "overrides are written key=value, such as model.width=32, got 'model.width'",
        ),
        ("model..width=5", "overrides are written key=value"),
    ],
)
def test_what_is_wrong_with_an_override_is_said(override, message):
    with pytest.raises(ConfigError, match=message):
        overridden(override)


def test_what_is_saved_loads_again_to_an_equal_config(write, tmp_path):
    cfg = LazyConfig.load(
        write(
            a="from trainkit.config import LazyCall as L\nfrom test_lazy_config import Point\n"
            "train = dict(seed=1, lr=1e-3, big=1e30, name='1e-3', none=None, flag=True, yes='yes', day='2026-01-01')\n"
            "points = dict(one=L(Point)(x='${train.seed}', y=(1, 2)), many=[L(Point)(x='${.y}', y='a: b')])\n"
            "points['one'].x2 = (3, [4])\npoints['late'] = dict(_target_=Point, x=1, y='???')"
        )
    )
    loaded = reloaded(cfg, tmp_path)
    assert OmegaConf.to_container(loaded) == OmegaConf.to_container(cfg)
    assert OmegaConf.to_container(loaded, resolve=True) == OmegaConf.to_container(cfg, resolve=True)
    assert loaded.points.late["_target_"] == "test_lazy_config.Point"
    assert [type(value) for value in loaded.train.values()] == [
        int,
        float,
        float,
        str,
        type(None),
        bool,
        str,
        str,
    ]
    assert list(loaded) == list(cfg) == ["train", "points"]


def test_loading_a_saved_config_runs_and_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "lazy_test_bomb.py").write_text("raise SystemExit('it went off')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "cfg.yaml").write_text("model: {_target_: lazy_test_bomb.Model, width: 1}")
    cfg = LazyConfig.apply_overrides(LazyConfig.load(tmp_path / "cfg.yaml"), ["model.width=2"])
    assert cfg.model["_target_"] == "lazy_test_bomb.Model"
    # it is there, and this is what resolves it
    with pytest.raises(SystemExit, match="it went off"):
        instantiate(cfg.model)


def test_a_node_holds_its_target_and_a_saved_one_the_shortest_path_of_it(tmp_path):
    cfg = OmegaConf.create(
        {
            "counter": LazyCall(itertools.count)(start=3),
            "point": LazyCall(Point)(x=1),
            "many": [LazyCall(torch.optim.SGD)(lr=0.1), LazyCall(Thing.make)()],
            "plain": [LazyCall(kind)(x=1) for kind in (dict, OrderedDict, Mapped)],
        },
        flags={"allow_objects": True},
    )
    assert cfg.counter._target_ is itertools.count
    assert cfg.many[0]._target_ is torch.optim.SGD
    # omegaconf would make nodes from these classes
    assert cfg.point._target_ == "test_lazy_config.Point"
    assert [node._target_ for node in cfg.plain[:2]] == [
        "builtins.dict",
        "collections.OrderedDict",
    ]

    saved = reloaded(cfg, tmp_path)
    assert [node._target_ for node in (saved.counter, saved.point, *saved.many, *saved.plain)] == [
        "itertools.count",
        "test_lazy_config.Point",
        "torch.optim.SGD",
        "test_lazy_config.Thing.make",
        "builtins.dict",
        "collections.OrderedDict",
        "test_lazy_config.Mapped",
    ]
    for node in (cfg, saved):
        assert next(instantiate(node.counter)) == 3
        assert instantiate(node.point) == Point(1)
        assert [type(instantiate(each)) for each in node.plain] == [dict, OrderedDict, Mapped]
    cfg.counter.pop("_target_")
    saved.counter.pop("_target_")
    assert saved.counter == cfg.counter
    assert not (tmp_path / "saved.yaml.pkl").exists()


@pytest.mark.parametrize("target", [3, None, [len], 2.5])
def test_a_target_that_cannot_be_called_is_refused_at_once(target):
    with pytest.raises(TypeError, match=f"the target of LazyCall .* got {re.escape(repr(target))}"):
        LazyCall(target)


def test_what_yaml_cannot_hold_is_saved_by_its_name_and_whole_in_a_pickle(tmp_path, caplog):
    factor = 3
    cfg = DictConfig(
        {
            "call": LazyCall(dict)(act=lambda x: factor * x, width=3),
            "made": LazyCall(lambda: factor)(),
            "number": Fraction(1, 2),
        },
        flags={"allow_objects": True},
    )
    saved = reloaded(cfg, tmp_path)
    assert "these values: test_lazy_config" in caplog.text
    assert f"The whole config is in {tmp_path / 'saved.yaml.pkl'}" in caplog.text
    assert saved.call["_target_"] == "builtins.dict"
    assert saved.call.width == 3
    whole = cloudpickle.loads((tmp_path / "saved.yaml.pkl").read_bytes())
    assert whole.call.act(5) == 15
    assert instantiate(whole.made) == 3
    assert whole.number == Fraction(1, 2)


def test_a_function_or_class_as_an_argument_is_found_again_in_the_saved_config(tmp_path, caplog):
    call = LazyCall(dict)(floor=math.floor, kind=torch.optim.SGD, of=[len])
    saved = reloaded(DictConfig({"call": call}, flags={"allow_objects": True}), tmp_path)
    for cfg in (saved, reloaded(saved, tmp_path)):
        assert instantiate(cfg.call) == {
            "floor": math.floor,
            "kind": torch.optim.SGD,
            "of": [len],
        }
    assert not caplog.messages
    assert not (tmp_path / "saved.yaml.pkl").exists()


def test_a_config_that_cannot_be_pickled_is_saved_with_the_reason(tmp_path, caplog):
    cfg = DictConfig({"x": (i for i in range(3)), "y": 1}, flags={"allow_objects": True})
    assert reloaded(cfg, tmp_path).y == 1
    assert f"{tmp_path / 'saved.yaml.pkl'} is not written: TypeError: " in caplog.text
    assert not (tmp_path / "saved.yaml.pkl").exists()


def test_a_config_is_shown_as_python_code_sorted_by_key():
    point = LazyCall(Point)(y=[1, {"a": LazyCall("math.floor")(x=2.5)}], x="${train.seed}")
    cfg = OmegaConf.create({"train": {"seed": 7, "name": "a", "none": {}}, "point": point})
    assert LazyConfig.to_py(cfg).splitlines() == [
        'cfg.point = test_lazy_config.Point(x=7, y=[1, {"a": math.floor(x=2.5)}])',
        'cfg.train.name = "a"',
        "cfg.train.none = {}",
        "cfg.train.seed = 7",
    ]
    assert LazyConfig.to_py(LazyCall("a.B")(c=1), prefix="model.") == "model = a.B(c=1)\n"


LONG_CODE = """\
cfg.a_long_name_of_a_list = [
    "xxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "xxxxxxxxxxxxxxxxxxxxxxxxxxxx",
]
cfg.call = itertools.count(
    wide=[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    x={"a": 'say "a"', "b": 2, "c": math.floor(x=[1, 2.4, "z"])},
    y="it's",
)
cfg.fits = torch.nn.Conv2d(
    name="xxxxxxxxxxxxxxxxxxxxxxxxxxxx", other="xxxxxxxxxxxxxxxxxxxxxxxxxxxx", third=3
)
cfg.one = torch.nn.Linear(
    name={
        "x": "xxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "y": "xxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        "z": 1,
    }
)
"""


def test_long_code_is_broken_as_black_does_it():
    long = "x" * 28
    cfg = OmegaConf.create(
        {
            "call": LazyCall(itertools.count)(
                y="it's", x={"b": 2, "a": 'say "a"', "c": LazyCall("math.floor")(x=[1, 2.4, "z"])}
            ),
            "fits": LazyCall("torch.nn.Conv2d")(name=long, other=long, third=3),
            "a_long_name_of_a_list": [long, long],
            "one": LazyCall("torch.nn.Linear")(name={"x": long, "y": long, "z": 1}),
        },
        flags={"allow_objects": True},
    )
    cfg.call.wide = [1] * 24
    assert LazyConfig.to_py(cfg) == LONG_CODE
