"""What plug-ins bring is found, one that cannot be imported is switched off, and a deleted one leaves nothing."""

from pathlib import Path

import pytest

import trainkit.engine.hooks
import trainkit.projects
from trainkit.engine import default_argument_parser
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils.plugins import find_plugins, lent_names, load
from trainkit.utils.registry import Registry

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in ROOT.glob("projects/*/plugin.py"))

TIDY = """
NAMES = {"Tidy": "tidy.hooks", "hooks": "tidy.hooks", "to_tidy_cfg": "tidy.hooks"}
LENDS = {"trainkit.engine.hooks": ["Tidy", "hooks"]}
RUN_HOOKS = ["Tidy"]
FORMATS = ["tidied"]
CONFIG_TYPES = {"builtins.complex": "to_tidy_cfg"}
OPTIONS = ["--tidy-up"]


def add_options(parser):
    parser.add_argument("--tidy-up", action="store_true")
"""
HOOKS = """
from trainkit.engine.hooks import HOOK_REGISTRY, HookBase


@HOOK_REGISTRY.register()
class Tidy(HookBase):
    pass


def to_tidy_cfg(cfg, args):
    pass
"""


@pytest.fixture
def tidy(plug_in, monkeypatch):
    """A package with all kinds of names."""
    monkeypatch.setattr(HOOK_REGISTRY, "_objects", dict(HOOK_REGISTRY))
    (plug_in("tidy", TIDY) / "hooks.py").write_text(HOOKS)


def test_an_entry_point_brings_names_to_registries_packages_runs_and_the_command_line(tidy):
    hook_class = HOOK_REGISTRY.get("Tidy")
    assert issubclass(hook_class, HookBase)
    assert load("Tidy") is trainkit.engine.hooks.Tidy is hook_class
    assert load("hooks").__name__ == trainkit.engine.hooks.hooks.__name__ == "tidy.hooks"
    assert {"Tidy", "hooks", "EMAHook", "HookBase"} <= {*dir(trainkit.engine.hooks)}
    assert {"Tidy", "EMAHook"}.isdisjoint(trainkit.engine.hooks.__all__)
    assert find_plugins().run_hooks == ["CopyAhead", "SamplerSeed", "RunRecord", "Tidy"]
    assert find_plugins().formats == ["shards", "safetensors", "tidied"]
    assert find_plugins().config_types["builtins.complex"] == "to_tidy_cfg"
    assert default_argument_parser().parse_args(["--tidy-up"]).tidy_up is True


def test_a_name_that_nobody_brings_is_an_attribute_error_or_an_import_error():
    with pytest.raises(AttributeError, match=r"'trainkit.engine.hooks' has no attribute 'Tidy'"):
        trainkit.engine.hooks.Tidy  # noqa: B018
    with pytest.raises(ImportError, match="'Tidy', which no installed project brings"):
        load("Tidy")
    assert "Tidy" not in Registry("EMPTY")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
        ("NAMES = {", "SyntaxError: '{' was never closed"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_plug_in_that_cannot_be_imported_is_switched_off_with_a_warning(
    plug_in, tidy, caplog, text, reason
):
    plug_in("broken", text)
    found = find_plugins()
    names = [plugin.module for plugin in found.each]
    assert {"tidy.plugin", "trainkit.projects.hooks.plugin"} <= {*names}
    assert "broken.plugin" not in names
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    start = "The plug-in broken.plugin is switched off, since it cannot be imported: "
    assert record.getMessage().startswith(f"{start}{reason}")
    assert found.switched_off == [record.getMessage()]


@pytest.mark.parametrize(
    "text",
    [
        "NAMES = {'EMAHook': 'mine'}",
        "OPTIONS = ['--fork']",
        "NAMES = {'to_mine': 'mine'}\nCONFIG_TYPES = {'omegaconf.dictconfig.DictConfig': 'to_mine'}",
    ],
)
def test_two_plug_ins_with_the_same_name_are_an_error_that_names_both(plug_in, text):
    plug_in("mine", text)
    with pytest.raises(
        ValueError, match=r"trainkit.projects.\w+.plugin and mine.plugin both bring '\S+'; remove"
    ):
        find_plugins()


def test_a_name_that_is_lent_needs_a_module(plug_in):
    plug_in("mine", "LENDS = {'trainkit.solver': ['Mine']}")
    with pytest.raises(ValueError, match=r"mine.plugin has 'Mine' in LENDS.* not in NAMES; add it"):
        find_plugins()


def test_a_plug_in_may_use_what_another_one_lends(plug_in):
    plug_in("mine", "from trainkit.engine.hooks import EMAHook\nNAMES = {'Mine': 'mine'}")
    assert find_plugins().names["Mine"] == "mine"
    assert find_plugins().switched_off == []


def test_plug_ins_stand_in_the_order_of_their_number_then_of_their_names(plug_in):
    plug_in("mine", "ORDER = -1")
    plug_in("another", "")
    names = [plugin.module for plugin in find_plugins().each]
    of_trainkit = [f"trainkit.projects.{folder.name}.plugin" for folder in FOLDERS]
    last = "trainkit.projects.preflight.plugin"
    of_trainkit.remove(last)
    assert names == ["mine.plugin", *of_trainkit, "another.plugin", last]


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_without_its_folder_nothing_is_left_of_a_project(folder, tmp_path, monkeypatch):
    (plugin,) = [
        plugin
        for plugin in find_plugins().each
        if plugin.module == f"trainkit.projects.{folder.name}.plugin"
    ]
    for other in FOLDERS:
        if other != folder:
            (tmp_path / other.name).symlink_to(other)
    monkeypatch.setattr(trainkit.projects, "__path__", [str(tmp_path)])
    find_plugins.cache_clear()
    try:
        found = find_plugins()
        assert len(found.each) == len(FOLDERS) - 1
        assert found.names.keys() & plugin.names.keys() == set()
        for package, names in plugin.lends.items():
            assert {*lent_names(package)} & {*names} == set()
    finally:
        find_plugins.cache_clear()
