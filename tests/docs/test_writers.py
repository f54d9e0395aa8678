"""What docs/writers.md shows does what it says."""

import pytest

from tests.docs.pages import blocks, run
from tests.engine.job import tiny_cfg
from trainkit.config import CfgNode, get_cfg
from trainkit.engine import DefaultTrainer
from trainkit.utils import events

PAGE = "docs/writers.md"
WITH_PANDAS, WITH_TENSORBOARD, REGISTERED, OWN = blocks(PAGE, "python")
(CONFIG,) = blocks(PAGE, "yaml")


def test_a_writer_of_ones_own_writes_with_the_others_and_the_files_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = tiny_cfg("output/digits", "LOG.WRITERS", ["json", "csv", "tensorboard"])
    trainer = run(OWN, PAGE)["Trainer"](cfg)
    trainer.train()
    lines = (tmp_path / "output/digits/newest.txt").read_text().splitlines()
    latest = trainer.storage.latest_with_smoothing_hint(20)

    assert len(lines) == len(latest) > 5
    assert f"total_loss {latest['total_loss'][0]:.4g} (9)" in lines
    assert {"metrics.json", "metrics.csv"} < {path.name for path in (tmp_path / "output/digits").iterdir()}

    losses = run(WITH_TENSORBOARD, PAGE)["losses"]
    assert [*losses] == [1, 3, 4, 5, 7, 9]  # after the evaluation, too
    assert losses[9] == pytest.approx(latest["total_loss"][0])

    pytest.importorskip("pandas")
    names = run(WITH_PANDAS.replace("lines=True", "lines=True, precise_float=True"), PAGE)

    table, same = names["table"], names["same"]
    assert [*table.index] == [*same.index] == [1, 3, 4, 5, 7, 9, 10]
    assert set(same.columns) == set(table.columns)
    for name in ("total_loss", "classification/top1"):
        assert table[name].dropna().to_dict() == same[name].dropna().to_dict()


def test_a_registered_writer_is_named_in_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr(events.WRITER_REGISTRY, "_objects", {})
    run(REGISTERED, PAGE)
    trainer = DefaultTrainer(tiny_cfg(tmp_path, "LOG.WRITERS", ["NumberOfScalars"]))
    trainer.train()

    assert int((tmp_path / "number.txt").read_text()) == len(trainer.storage.latest())
    cfg = get_cfg()
    cfg.merge_from_other_cfg(CfgNode(CfgNode._load_cfg_from_yaml_str(CONFIG)))
    assert cfg.LOG.PERIOD == 50
