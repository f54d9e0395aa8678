"""The writers by their names in LOG.WRITERS; without the packages."""

import pytest

from tests.engine.job import tiny_cfg
from trainkit.config import ConfigError
from trainkit.engine import default_writers
from trainkit.utils.events import CSVWriter, MLflowWriter, WandbWriter


@pytest.mark.parametrize(("name", "kind"), [("wandb", WandbWriter), ("mlflow", MLflowWriter)])
def test_writers_of_other_packages_are_there_by_name(tmp_path, monkeypatch, name, kind):
    cfg = tiny_cfg(tmp_path, "SEED", 3)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    kinds = [type(writer) for writer in default_writers(tmp_path, names=["csv", name], cfg=cfg)]
    assert kinds == [CSVWriter, kind]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = rf"{kind.__name__} needs the package {name}: pip install 'trainkit\[{name}\]'"
    with pytest.raises(ConfigError, match=error):
        default_writers(tmp_path, names=[name])
