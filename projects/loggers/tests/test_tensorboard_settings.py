"""The settings of runs in TensorBoard's tabs HPARAMS and TEXT."""

from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.backend_context import Context
from trainkit.projects.loggers.tensorboard_settings import TensorboardSettings
from trainkit.projects.loggers.tests.written import write

from tests.engine.job import tiny_cfg
from trainkit.engine import default_writers
from trainkit.utils.events import TensorboardXWriter

SETTINGS = {"SOLVER.BASE_LR": 0.5, "SEED": 3, "MODEL.NAME": "Net", "FLAG": True, "DATASETS.VAL": ["a"], "NONE": None}

pytestmark = pytest.mark.usefixtures("seconds")


def shown(folder):
    """Hyper-parameters and texts."""
    events = EventAccumulator(str(folder)).Reload()
    content = events.PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
    found = metadata.parse_session_start_info_plugin_data(content).hparams
    texts = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("config/text_summary")]
    return {name: value.number_value or value.string_value for name, value in found.items()}, texts


def test_settings_and_config_are_written_once(tmp_path):
    writer = TensorboardSettings(tmp_path, SETTINGS, "A:\n  B: 1\n")
    writer.begin(None)
    writer.write()
    writer.write()
    resumed = TensorboardSettings(tmp_path, {"SEED": 4})
    resumed.load_state_dict(writer.state_dict())
    resumed.write()

    assert len(list(tmp_path.iterdir())) == 1
    values = {**SETTINGS, "FLAG": "True", "DATASETS.VAL": "['a']", "NONE": "None"}
    assert shown(tmp_path) == (values, ["    A:\n      B: 1\n"])


def test_the_settings_of_a_config_are_those_that_differ_from_the_defaults(tmp_path):
    cfg = tiny_cfg(tmp_path, "SEED", 7)
    [writer] = default_writers(tmp_path, names=["tensorboard_settings"], cfg=cfg)
    writer.write()

    values, [text] = shown(tmp_path)
    assert values["SEED"] == 7
    assert "VERSION" not in values
    assert "    SEED: 7\n" in text


def test_tensorboard_compares_the_settings_of_all_runs_and_takes_their_scalars_for_metrics(tmp_path):
    for name, settings in {"a": {"SOLVER.BASE_LR": 0.5}, "b": {"SOLVER.BASE_LR": 1.0, "SEED": 3}}.items():
        TensorboardSettings(tmp_path / name, settings).write()
        writer = TensorboardXWriter(tmp_path / name)
        write(writer, 0, **{"total_loss": 1.0, "digits/top1": 50.0})
        writer.close()
    events = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    provider = MultiplexerDataProvider(events, str(tmp_path))
    backend, request = Context(SimpleNamespace(data_provider=provider)), RequestContext()

    contents = backend.hparams_metadata(request, experiment_id="")
    found = backend.experiment_from_metadata(request, "", True, contents, [])
    assert {info.name: info.differs for info in found.hparam_infos} == {"SOLVER.BASE_LR": True, "SEED": False}
    assert {info.name.tag for info in found.metric_infos} == {"total_loss", "digits/top1"}
