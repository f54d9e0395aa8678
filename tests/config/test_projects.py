"""Keys of projects: they are there, they are checked if they are used, and config.yaml has them if they are changed."""

import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import trainkit.projects
from tests.engine.job import tiny_cfg
from trainkit.config import (
    CfgNode,
    ConfigError,
    check_values,
    get_cfg,
    prepare_projects,
    resolve_lengths,
)
from trainkit.config.config import changed_settings, mark_as_defaults
from trainkit.config.defaults import MEANT_IF_SET, core_defaults, keys_of
from trainkit.config.lengths import check_lengths_go_on
from trainkit.config.projects import projects_in_use
from trainkit.engine import DefaultTrainer, default_argument_parser, default_setup
from trainkit.solver import build_optimizer
from trainkit.utils.plugins import find_plugins
from trainkit.utils.run_folder import release_folder

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in ROOT.glob("projects/*/plugin.py"))

NOISE = """
import torch
from trainkit.config import CfgNode, ConfigError

calls = []


def add_config(cfg):
    cfg.MODEL.NOISE = CfgNode({"SCALE": 0.0, "OF": {"LAYERS": []}})
    cfg.TEST.NOISY = False


def check(cfg):
    calls.append("check")
    if cfg.MODEL.NOISE.SCALE < 0:
        raise ConfigError(f"MODEL.NOISE.SCALE is {cfg.MODEL.NOISE.SCALE}")


def prepare(cfg):
    calls.append(f"prepare {cfg.TEST.NOISY} {cfg.MODEL.NOISE.OF.LAYERS}")


def wrap_model(cfg, model):
    with torch.no_grad():
        model.layers[0].weight.mul_(cfg.MODEL.NOISE.SCALE)
    return model


def wrap_loader(cfg, loader):
    calls.append("loader")
    return loader


def add_options(parser):
    parser.add_argument("--noise", type=float, default=0.0)


OPTIONS = ["--noise"]


def apply_options(cfg, args):
    cfg.merge_from_list(["MODEL.NOISE.SCALE", args.noise])
    return lambda: calls.append("ready")
"""


@pytest.fixture
def noise(plug_in):
    """The calls of the functions of a plug-in."""
    plug_in("noise", NOISE)
    find_plugins()
    return sys.modules["noise.plugin"].calls


def test_the_keys_of_a_plug_in_are_there_with_their_defaults_and_types(noise):
    cfg = get_cfg()
    assert cfg.MODEL.NOISE == {"SCALE": 0.0, "OF": {"LAYERS": []}}
    assert not cfg.MODEL.NOISE.is_set("SCALE")
    cfg.merge_from_list(["MODEL.NOISE.SCALE", 2])
    assert cfg.MODEL.NOISE.SCALE == 2.0
    assert type(cfg.MODEL.NOISE.SCALE) is float
    with pytest.raises(ConfigError, match=r"MODEL.NOISE.SCALE: got 'loud' .* accepted: a number"):
        cfg.merge_from_list(["MODEL.NOISE.SCALE", "loud"])
    with pytest.raises(ConfigError, match=r"unknown key MODEL.NOISE.SCALES; did you mean"):
        cfg.merge_from_list(["MODEL.NOISE.SCALES", 2])
    assert get_cfg().MODEL.NOISE.SCALE == 0.0


def test_the_functions_of_a_plug_in_are_called_if_one_of_its_keys_is_changed(noise, tmp_path):
    torch.manual_seed(0)
    plain = DefaultTrainer(tiny_cfg(tmp_path, "TEST.NOISY", False))  # its default
    assert noise == []
    torch.manual_seed(0)
    loud = DefaultTrainer(tiny_cfg(tmp_path, "MODEL.NOISE.SCALE", 2.0))
    assert torch.equal(loud.model.layers[0].weight, 2 * plain.model.layers[0].weight)
    assert {*noise} == {"check", "prepare False []", "loader"}
    with pytest.raises(ConfigError, match="MODEL.NOISE.SCALE is -1.0"):
        DefaultTrainer(tiny_cfg(tmp_path, "MODEL.NOISE.SCALE", -1.0))


def test_an_option_of_a_plug_in_is_applied_and_its_function_is_called_later(noise, tmp_path):
    cfg = tiny_cfg(tmp_path)
    default_setup(cfg, default_argument_parser().parse_args(["--noise", "0.5"]))
    release_folder(tmp_path)
    assert cfg.MODEL.NOISE.SCALE == 0.5
    assert noise == ["check", "ready"]


FADES = """
LENGTH_LISTS = ["MODEL.FADES"]


def add_config(cfg):
    cfg.MODEL.FADES = []


def unused_keys(cfg):
    return ["SOLVER.GAMMA"]


def scale(cfg, num_ranks):
    cfg = cfg.clone()
    cfg.SOLVER.IMS_PER_BATCH *= num_ranks
    return cfg
"""


def test_a_plug_in_says_which_lists_have_lengths_which_keys_are_unused_and_how_ranks_scale(plug_in):
    plug_in("fades", FADES)
    off = get_cfg()
    off.merge_from_list(["SOLVER.GAMMA", -1.0, "SOLVER.IMS_PER_BATCH", 3])
    on = off.clone()
    on.merge_from_list(["MODEL.FADES", [{"END": "2ep"}, {"END": 5}]])

    with pytest.raises(ConfigError, match="SOLVER.GAMMA: got -1.0"):
        check_values(off)
    check_values(on)
    assert resolve_lengths(on, 7).MODEL.FADES == [{"END": 14}, {"END": 5}]
    with pytest.raises(ConfigError, match="give the lengths in MODEL.FADES in iterations"):
        check_lengths_go_on(on, 7, Fraction(7), Fraction(8))
    assert DefaultTrainer.auto_scale_workers(off, 4).SOLVER.IMS_PER_BATCH == 3
    assert DefaultTrainer.auto_scale_workers(on, 4).SOLVER.IMS_PER_BATCH == 12


def test_what_is_missing_in_a_config_has_its_default(noise):
    cfg = CfgNode({"TEST": {"NOISY": True}, "MODEL": {"NOISE": {"OF": {}}}})
    prepared = prepare_projects(cfg)
    assert noise == ["prepare True []"]
    assert prepared.MODEL.NOISE == {"SCALE": 0.0, "OF": {"LAYERS": []}}
    assert cfg.MODEL.NOISE == {"OF": {}}


def test_a_config_without_any_key_of_a_project_builds_the_same_optimizer():
    def build(cfg):
        cfg.SOLVER.BASE_LR = 0.5
        return build_optimizer(cfg, torch.nn.Linear(1, 1)).state_dict()["param_groups"]

    assert build(core_defaults()) == build(get_cfg())


def test_none_switches_off_a_key_whose_default_is_off():
    cfg = get_cfg()
    for key in ("MAX_TIME", "CHECKPOINT.PUBLISH", "SOLVER.LOGICAL_RANKS", "SOLVER.GRAPH.ENABLED"):
        cfg.merge_from_list([key, None])
    assert projects_in_use(cfg) == []
    check_values(cfg)


def test_two_plug_ins_with_the_same_key_are_an_error_that_names_both(plug_in):
    plug_in("mine", "def add_config(cfg):\n    cfg.SOLVER.GRAPH = True")
    with pytest.raises(
        ConfigError,
        match=r"trainkit.projects.graph.plugin and mine.plugin both have the key SOLVER.GRAPH; remove",
    ):
        get_cfg()


def test_plug_ins_may_share_a_node_but_no_key_in_it(plug_in):
    text = (
        "from trainkit.config import CfgNode\ndef add_config(cfg):\n    cfg.OUR = CfgNode({%r: 1})"
    )
    plug_in("mine", text % "A")
    plug_in("yours", text % "B")
    assert get_cfg().OUR == {"A": 1, "B": 1}
    plug_in("theirs", text % "B")
    with pytest.raises(ConfigError, match=r"theirs.plugin and yours.plugin .* the key OUR.B;"):
        get_cfg()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("SOLVER.BASE_LR", "1.0"),
        ("SOLVER.BASE_LR", "CfgNode({'A': 1})"),
        ("SOLVER.AMP", "1.0"),
    ],
)
def test_a_plug_in_that_changes_a_key_of_trainkit_is_an_error(plug_in, key, value):
    text = f"def add_config(cfg):\n    cfg.{key} = {value}"
    plug_in("mine", f"from trainkit.config import CfgNode\n{text}")
    with pytest.raises(ConfigError, match=f"mine.plugin changes {key}, a key of trainkit"):
        get_cfg()


def test_a_plug_in_that_cannot_add_its_keys_is_an_error_that_names_it(plug_in):
    plug_in("mine", "def add_config(cfg):\n    cfg.NOT_THERE.A = 1")
    with pytest.raises(
        ConfigError,
        match=r"add_config of the plug-in mine.plugin fails: NoSuchKeyError: .*NOT_THERE",
    ):
        get_cfg()


def test_a_new_key_in_an_open_node_of_a_plug_in_is_a_change(plug_in):
    text = "from trainkit.config import CfgNode\n"
    text += "def add_config(cfg):\n    cfg.MINE = CfgNode({'A': 1}, new_allowed=True)"
    plug_in("mine", text)
    cfg = get_cfg()
    assert projects_in_use(cfg) == []
    cfg.merge_from_list(["MINE.B", 2])
    assert [plugin.module for plugin in projects_in_use(cfg)] == ["mine.plugin"]
    assert yaml.safe_load(cfg.dump())["MINE"] == {"B": 2}


def test_the_log_of_a_run_says_which_plug_in_is_switched_off(plug_in, tmp_path):
    plug_in("broken", "1 / 0")
    default_setup(tiny_cfg(tmp_path), SimpleNamespace())
    release_folder(tmp_path)
    assert "The plug-in broken.plugin is switched off" in (tmp_path / "log.txt").read_text()


def test_config_yaml_has_only_the_keys_of_projects_that_are_not_at_their_defaults(noise, tmp_path):
    cfg = get_cfg()
    assert cfg.dump() == with_marks(core_defaults()).dump()
    cfg.merge_from_list(["TEST.NOISY", False, "SOLVER.GRAPH.ENABLED", False])  # set, but no change
    cfg.SOLVER.PARAM_GROUPS.LAYER_DECAY.RATE = 0.5
    cfg.DATALOADER["OVERFIT_BATCHES"] = 2  # as trainkit changes a key for the user
    text = cfg.dump()
    found = yaml.safe_load(text)
    assert found["SOLVER"].pop("PARAM_GROUPS") == {"LAYER_DECAY": {"RATE": 0.5}}
    assert found["DATALOADER"].pop("OVERFIT_BATCHES") == 2
    assert found == yaml.safe_load(get_cfg().dump())
    (tmp_path / "config.yaml").write_text(text)
    again = get_cfg()
    again.merge_from_file(tmp_path / "config.yaml")
    assert again == cfg


def test_a_run_is_opened_where_a_project_is_missing_that_it_did_not_use(noise, monkeypatch):
    text = get_cfg().dump()
    monkeypatch.delitem(sys.modules, "noise")
    monkeypatch.delitem(sys.modules, "noise.plugin")
    monkeypatch.setattr(trainkit.projects, "__path__", [])
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "installed" not in path])
    find_plugins.cache_clear()
    assert find_plugins().each == []
    cfg = get_cfg()
    cfg.merge_from_other_cfg(CfgNode.load_cfg(text))
    assert cfg == core_defaults()
    check_values(cfg)


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_the_keys_of_a_project_are_gone_with_its_folder(folder, tmp_path, monkeypatch):
    module = f"trainkit.projects.{folder.name}.plugin"
    (plugin,) = [plugin for plugin in find_plugins().each if plugin.module == module]
    own = {key for key, _ in changed_settings(keys_of(plugin), CfgNode())}
    before = {key for key, _ in changed_settings(get_cfg(), CfgNode())}
    for other in FOLDERS:
        if other != folder:
            (tmp_path / other.name).symlink_to(other)
    monkeypatch.setattr(trainkit.projects, "__path__", [str(tmp_path)])
    find_plugins.cache_clear()
    try:
        after = {key for key, _ in changed_settings(get_cfg(), CfgNode())}
        check_values(get_cfg())
    finally:
        find_plugins.cache_clear()
    assert own <= before
    assert after == before - own


def test_a_script_adds_keys_of_its_own(tmp_path):
    def add_config(cfg):
        cfg.TEST.MINE = CfgNode({"SIZE": 3})
        cfg.MINE = ""

    cfg = get_cfg()
    add_config(cfg)
    cfg.merge_from_list(["TEST.MINE.SIZE", "5", "MINE", "x"])
    check_values(cfg)
    (tmp_path / "config.yaml").write_text(cfg.dump())
    again = get_cfg()
    with pytest.raises(ConfigError, match="unknown key MINE"):
        again.merge_from_file(tmp_path / "config.yaml")
    again = get_cfg()
    add_config(again)
    again.merge_from_file(tmp_path / "config.yaml")
    assert again == cfg
    assert again.TEST.MINE.SIZE == 5
    assert again.MINE == "x"


def with_marks(cfg):
    """The keys whose values count as not set are left out of a dump, too."""
    mark_as_defaults(cfg, MEANT_IF_SET)
    return cfg
