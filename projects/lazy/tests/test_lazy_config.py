"""Configs written in Python: loading, relative imports, overrides, saving, and making the calls they describe."""

import builtins
import math
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from types import ModuleType

import pytest
from omegaconf import DictConfig, ListConfig, OmegaConf

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


HELPERS = {}  # what configs call


def load_yaml(tmp_path, text):
    (tmp_path / "cfg.yaml").write_text(text)
    return LazyConfig.load(tmp_path / "cfg.yaml")


# ---------------------------------------------------------------------- loading Python


def test_a_file_gives_its_nodes_and_nothing_else(write):
    cfg = LazyConfig.load(write(a="import math\nmodel = dict(width=3, at=[1, (2, 3)])\n_private = {}\nnumber = 1"))
    assert isinstance(cfg, DictConfig)
    assert cfg == {"model": {"width": 3, "at": [1, [2, 3]]}}
    assert cfg.model.at[1][0] == 2


def test_names_are_asked_for_by_key(write):
    path = write(a="model = dict(width=3)\nnumber = 1\nitems = [dict(a=1)]")
    assert LazyConfig.load(path, "number") == 1
    model, number = LazyConfig.load(path, ("model", "number"))
    assert (model.width, number) == (3, 1)
    with pytest.raises(ConfigError, match="a.py has no 'modle'; did you mean 'model'?"):
        LazyConfig.load(path, "modle")


def test_files_import_from_each_other_relatively(write):
    path = write(
        jobs__job="from ..base import train\nfrom .parts import *\nmodel.steps += 1\n"
        "from ..parts.data import loader as data\n",
        jobs__parts="from ..base import train as _train\nmodel = dict(steps=_train.steps)\nwidth = 3",
        base="train = dict(steps=10)",
        parts__data="import math\nloader = dict(size=math.floor(2.5))",
    )
    assert LazyConfig.load(path) == {"train": {"steps": 10}, "model": {"steps": 11}, "data": {"size": 2}}


def test_each_import_is_a_copy_of_its_own(write):
    path = write(
        job="from .base import train\nfrom .other import train as other\ntrain.steps = 20",
        other="from .base import train\ntrain.steps += 1",
        base="train = dict(steps=10)",
    )
    assert LazyConfig.load(path) == {"train": {"steps": 20}, "other": {"steps": 11}}
    assert LazyConfig.load(path.with_name("base.py")) == {"train": {"steps": 10}}


def test_load_rel_starts_from_the_file_that_calls_it(write):
    write(parts__model="model = dict(width=3)")
    path = write(job="from trainkit.config import LazyConfig\nmodel = LazyConfig.load_rel('parts/model.py', 'model')")
    assert LazyConfig.load(path) == {"model": {"width": 3}}


class ImportsWhenTouched(ModuleType):
    """A lazy module whose package is missing, as some libraries leave it in ``sys.modules``."""

    def __getattr__(self, name):
        raise ImportError(f"{self.__name__} is not installed")


def test_load_rel_touches_no_other_module(write, tmp_path, monkeypatch):
    write(model="model = dict(width=3)")
    monkeypatch.setitem(sys.modules, "lazy", ImportsWhenTouched("lazy"))
    cell = compile("result = LazyConfig.load_rel('model.py', 'model')", str(tmp_path / "cell"), "exec")
    exec(cell, namespace := {"LazyConfig": LazyConfig})
    assert namespace["result"] == {"width": 3}


def test_a_function_of_a_config_imports_relatively_also_when_it_is_called_later(write):
    path = write(job="def build():\n    from .base import train\n    return train.steps", base="train = dict(steps=10)")
    assert LazyConfig.load(path, "build")() == 10


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"a": "from .b import x"}, ImportError, "the relative import from .*b.py does not exist"),
        ({"a": "from . import b", "b": ""}, ImportError, "write from .file import name"),
        ({"a": "from .b import x", "b": ""}, ImportError, "cannot import name 'x'"),
        (
            {"a": "from .b import x", "b": "from .a import y"},
            ConfigError,
            "itself; leave out one of these imports: [^>]*a.py -> [^>]*b.py -> [^>]*a.py$",
        ),
        ({"a": "x = dict(\n"}, SyntaxError, "a.py"),
        ({"a": "from .b import x", "b": "1 / 0"}, ZeroDivisionError, "division"),
        (
            {"a": "from test_lazy_config import Point\nx = dict(y=[Point])"},
            ConfigError,
            "a.py: x.y.0 is the class of a dataclass, .* write LazyCall",
        ),
        ({"a": "x = {(1, 2): 3}"}, ConfigError, "a.py: Incompatible key type 'tuple'"),
        ({"a": "x = dict(y='${')"}, ConfigError, "a.py: .*full_key: x.y"),
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


def test_the_import_of_other_code_is_python_s_own_while_and_after_a_config_is_loaded(write, monkeypatch):
    seen = []
    monkeypatch.setitem(HELPERS, "look", lambda: seen.append(builtins.__import__))
    python_s_own = builtins.__import__
    look = "from test_lazy_config import HELPERS\nHELPERS['look']()\n"
    path = write(a=f"{look}from .b import x", b=f"{look}from .c import x", c=f"{look}x = {{}}\nraise KeyError")
    with pytest.raises(KeyError):
        LazyConfig.load(path)
    assert seen == [python_s_own] * 3
    assert builtins.__import__ is python_s_own


def test_a_module_that_a_config_imports_imports_as_ever(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    write(lazy_test_package__a="from .b import value", lazy_test_package__b="value = {1: 2}")
    path = write(job="from lazy_test_package.a import value\nsame = dict(is_dict=type(value) is dict)")
    assert LazyConfig.load(path).same.is_dict
    assert "lazy_test_package.b" in sys.modules


def test_a_config_is_found_in_no_module(write):
    before = set(sys.modules)
    LazyConfig.load(write(a="from .b import x", b="x = {}"))
    assert set(sys.modules) == before


def test_threads_load_at_the_same_time(write, monkeypatch):
    both_are_inside, loaded = threading.Barrier(2, timeout=30), {}
    monkeypatch.setitem(HELPERS, "wait", both_are_inside.wait)
    job = "from .base import train\nfrom test_lazy_config import HELPERS as _HELPERS\n_HELPERS['wait']()\n"
    folder = write(a__job=job + "from .base import *", a__base="train = dict(name='a')").parents[1]
    write(b__job=job + "from .base import *", b__base="train = dict(name='b')")

    def load(name):
        loaded[name] = LazyConfig.load(folder / name / "job.py")

    threads = [threading.Thread(target=load, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == {"a": {"train": {"name": "a"}}, "b": {"train": {"name": "b"}}}


# ---------------------------------------------------------------------- calls


@pytest.mark.parametrize("target", [Fraction.from_float, Fraction, lambda x: x + 1])
def test_a_call_is_a_node_with_its_target(target):
    node = LazyCall(target)(a=1, at=(2, 3))
    assert node == {"_target_": target, "a": 1, "at": [2, 3]}
    assert LazyCall("fractions.Fraction")(a=1)["_target_"] == "fractions.Fraction"


@pytest.mark.parametrize(
    ("target", "path"), [(Counter, "collections.Counter"), (Point, "test_lazy_config.Point"), (dict, "dict")]
)
def test_classes_that_omegaconf_takes_for_instances_stand_in_the_node_by_their_path(target, path):
    node = LazyCall(target)(x=1)
    assert node["_target_"].removeprefix("builtins.") == path
    assert instantiate(node) == target(x=1)


def test_a_target_is_saved_by_its_path(tmp_path):
    LazyConfig.save({"call": LazyCall(Fraction.from_float)(f=0.5)}, tmp_path / "saved.yaml")
    call = LazyConfig.load(tmp_path / "saved.yaml").call
    assert call == {"_target_": "fractions.Fraction.from_float", "f": 0.5}
    assert instantiate(call) == Fraction(1, 2)


@pytest.mark.parametrize("target", [3, None, {"a": 1}])
def test_a_target_is_something_to_call(target):
    with pytest.raises(TypeError, match="target must be a class, a function, a dotted path or a LazyCall of one"):
        LazyCall(target)


def test_instantiate_makes_the_inner_calls_first_and_passes_plain_values():
    inner = LazyCall(Point)(x=1, y=2)
    node = LazyCall(dict)(point=inner, many=[inner, {"deep": inner}], at=(1, [2]), number=3)
    made = instantiate(node)
    assert made == {"point": Point(1, 2), "many": [Point(1, 2), {"deep": Point(1, 2)}], "at": [1, [2]], "number": 3}
    assert [type(made["many"]), type(made["many"][1]), type(made["at"][1])] == [list, dict, list]
    assert node.point == inner  # it stays a description


@pytest.mark.parametrize("wrap", [DictConfig, dict])
def test_instantiate_takes_nodes_lists_and_dicts(wrap):
    call = {"_target_": "test_lazy_config.Point", "x": 1}
    assert instantiate(wrap(call)) == Point(1)
    assert instantiate(wrap({"a": {"b": [call]}})) == {"a": {"b": [Point(1)]}}
    assert instantiate(ListConfig([call, 2])) == [Point(1), 2]
    assert instantiate([wrap(call), (wrap(call),)]) == [Point(1), (Point(1),)]


def test_instantiate_returns_what_is_no_description_as_it_is():
    thing = Point(1)
    assert instantiate(thing) is thing
    assert instantiate({"_target_": dict, "thing": thing})["thing"] is thing


def test_a_target_can_be_described_as_well():
    target = {"_target_": "trainkit.utils.registry.locate", "name": "collections.Counter"}
    assert instantiate({"_target_": target, "a": 2}) == Counter(a=2)


def test_references_are_followed_from_the_whole_config():
    cfg = OmegaConf.create({"train": {"seed": 7}, "point": LazyCall(Point)(x="${train.seed}", y="${.x}")})
    assert instantiate(cfg.point) == Point(7, 7)
    assert instantiate({**cfg.point, "y": 1}) == Point(7, 1)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "test_lazy_config.Piont", "x": 1}, r"Piont\(x\): cannot locate .* has no attribute 'Piont'"),
        ({"_target_": "no_such_package.Point"}, r"no_such_package.Point\(\): cannot locate"),
        ({"_target_": "math.pi", "x": 1}, r"math.pi\(x\) is 3.14.*, which cannot be called"),
        ({"_target_": Point, "x": 1, "z": 2}, r"test_lazy_config.Point\(x, z\) failed: TypeError: .*'z'"),
        ({"_target_": fail, "error": ValueError}, r"test_lazy_config.fail\(error\) failed: ValueError: no"),
        (DictConfig({"_target_": "builtins.dict", "x": "???"}), "Missing mandatory value: x"),
        (DictConfig({"_target_": "builtins.dict", "x": "${nowhere}"}), "'nowhere' not found"),
    ],
)
def test_what_is_wrong_with_a_call_is_said_with_its_target_and_arguments(node, message):
    with pytest.raises(ConfigError, match=f"(?s){message}") as caught:
        instantiate({"outer": [node]})
    assert caught.value.__cause__ is not None or "cannot be called" in message


def test_another_error_of_a_target_is_no_mistake_in_the_config_and_is_chained():
    with pytest.raises(RuntimeError, match=r"test_lazy_config.fail\(error\) failed: KeyError: 'no'") as caught:
        instantiate({"_target_": fail, "error": KeyError})
    assert isinstance(caught.value.__cause__, KeyError)


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
        ("name.first=5", "name.first: name is 'a', which has no 'first'"),
        ("+model.act.slope=5", "model.act.slope: model.act is None, which has no 'slope'"),
        ("hooks.1.period=5", "hooks is .*, which has no '1'"),
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


def test_a_tuple_that_is_set_later_is_saved_as_a_list(write, tmp_path):
    cfg = LazyConfig.load(write(a="train = dict(at=None)"))
    cfg.train.at = (1, 2)
    LazyConfig.save(cfg, tmp_path / "saved.yaml")
    assert LazyConfig.load(tmp_path / "saved.yaml") == {"train": {"at": [1, 2]}}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, {"deep": Fraction(1, 2)}], r"model.act.1.deep is Fraction\(1, 2\)"),
        ({"_target_": partial(math.floor, 1)}, r"model.act._target_ is functools.partial"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path, value, message):
    cfg = DictConfig({"model": {"act": value}}, flags={"allow_objects": True})
    with pytest.raises(ConfigError, match=f"cannot be saved.*{message}.*write LazyCall"):
        LazyConfig.save(cfg, tmp_path / "saved.yaml")
    assert not (tmp_path / "saved.yaml").exists()


def test_a_function_as_an_argument_can_be_saved_as_the_warning_proposes(tmp_path):
    cfg = {"call": LazyCall(dict)(f=LazyCall("trainkit.utils.registry.locate")(name="math.floor"))}
    LazyConfig.save(cfg, tmp_path / "saved.yaml")
    assert instantiate(LazyConfig.load(tmp_path / "saved.yaml").call) == {"f": math.floor}


def test_loading_a_saved_config_runs_and_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "lazy_test_bomb.py").write_text("raise SystemExit('it went off')")
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = load_yaml(tmp_path, "model: {_target_: lazy_test_bomb.Model, width: 1}")
    assert cfg.model["_target_"] == "lazy_test_bomb.Model"
    LazyConfig.apply_overrides(cfg, ["model.width=2"])
    with pytest.raises(SystemExit, match="it went off"):  # it is there, and this is what resolves it
        instantiate(cfg.model)


@pytest.mark.parametrize("tag", ["!!python/name:os.system", "!!python/object/apply:os.getcwd []", "!!python/tuple [1]"])
def test_a_tag_that_names_code_is_refused(tmp_path, tag):
    with pytest.raises(ConfigError, match=r"cfg.yaml: .*python(.*\n)* .*line 1"):
        load_yaml(tmp_path, f"model: {tag}")


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


def test_without_omegaconf_the_error_says_how_to_install_it(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    path = write(a="x = {}")
    for use in (lambda: LazyConfig.load(path), lambda: LazyCall(dict)(), lambda: instantiate({})):
        with pytest.raises(ConfigError, match=r"pip install 'trainkit\[lazy\]'"):
            use()
