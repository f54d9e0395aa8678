"""Every hook, and settings of the optimization, switched on by the config of a digits job.

Its effect must be absent without the options, and there in a run that consists of two ``train()`` calls, a save, a load
in a new trainer and a third call.
"""

import re
from functools import cache
from itertools import pairwise

import pytest

from tests.tools.digits_run import in_one_piece, in_pieces
from tests.tools.settings_of_hooks import HOOKS
from tests.tools.settings_of_optimization import OPTIMIZATION
from trainkit.engine.hooks import HOOK_REGISTRY

SETTINGS = [*HOOKS, *OPTIMIZATION]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run of some options; settings of the same base share it."""
    return cache(lambda *base: in_one_piece(tmp_path_factory.mktemp("plain"), *base))


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_without_the_setting_its_effect_is_absent(setting, plain):
    with pytest.raises((AssertionError, KeyError, FileNotFoundError)):
        setting.effect(plain(*map(str, setting.base)))


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_survives_two_calls_of_train_and_a_resume(setting, tmp_path):
    setting.effect(in_pieces(tmp_path, *setting.base, *setting.options))


def test_every_hook_of_the_registry_has_a_setting():
    lists = [value for setting in SETTINGS for key, value in pairwise(setting.options) if key == "HOOKS"]
    named = {entry["NAME"] for entries in lists for entry in entries}
    by_keys = {"BestCheckpoints", "CopyAhead", "FrozenWeights", "PreciseBN", "Preflight", "TimeLimit"}  # or options
    alone = {"GradNorm", "KeepBatch", "KillAt", "LoadsAgain"}  # their own tests are enough
    names = {name for name, hook in HOOK_REGISTRY if re.match(r"trainkit\.(?!.*\.tests\.)", hook.__module__)}
    assert names - named - by_keys - alone == set()
