"""What a run was made of, in TensorBoard's tabs HPARAMS and TEXT."""

import io
import itertools
import time
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.summary.writer import event_file_writer

from trainkit.utils.events import EventStorage, TensorboardXWriter

SETTINGS = {"SOLVER.BASE_LR": 0.5, "SEED": 3, "MODEL.NAME": "Net", "FLAG": True, "DATASETS.VAL": ["a"], "NONE": None}


@pytest.fixture(autouse=True)
def seconds(monkeypatch):
    """Each file of events begins in a second of its own, as with processes: its name has to tell the order."""
    clock = itertools.count(1_700_000_000)
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: next(clock), sleep=time.sleep))


def events_in(folder):
    events = EventAccumulator(str(folder))
    return events.Reload()


def hyper_parameters(events):
    contents = events.PluginTagToContent("hparams")
    assert list(contents) == [metadata.SESSION_START_INFO_TAG]
    return dict(metadata.parse_session_start_info_plugin_data(contents[metadata.SESSION_START_INFO_TAG]).hparams)


def texts(events):
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors("config/text_summary")]


def write(writer, iter, **scalars):
    with EventStorage(iter) as storage:
        storage.put_scalars(**scalars)
        writer.write()


def test_settings_and_config_are_written_once_into_the_file_of_the_scalars(tmp_path):
    writer = TensorboardXWriter(tmp_path, settings=SETTINGS, config="A:\n  B: 1\n")
    with EventStorage():
        writer.write()
    assert list(tmp_path.iterdir()) == []
    write(writer, 0, loss=1.0)
    write(writer, 1, loss=2.0)
    writer.close()

    assert len(list(tmp_path.iterdir())) == 1
    events = events_in(tmp_path)
    values = {name: value.number_value or value.string_value for name, value in hyper_parameters(events).items()}
    assert values == {**SETTINGS, "FLAG": "True", "DATASETS.VAL": "['a']", "NONE": "None"}
    assert texts(events) == [(0, "    A:\n      B: 1\n")]
    assert [event.step for event in events.Scalars("loss")] == [0, 1]


def test_without_settings_nothing_is_said(tmp_path):
    writer = TensorboardXWriter(tmp_path)
    write(writer, 0, loss=1.0)
    writer.close()

    assert events_in(tmp_path).Tags()["tensors"] == []


@pytest.mark.parametrize("writes", [0, 1])
@pytest.mark.parametrize("load", [True, False])
def test_a_resumed_run_does_not_say_them_again(tmp_path, writes, load):
    first = TensorboardXWriter(tmp_path, settings=SETTINGS, config="A: 1")
    for iter in range(writes):
        write(first, iter, loss=1.0)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    write(first, writes, loss=2.0)
    first.close()

    second = TensorboardXWriter(tmp_path, settings={"SEED": 4}, config="B: 2")
    if load:
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=True))
    write(second, writes, loss=2.0)
    second.close()

    parts = [events_in(path) for path in sorted(tmp_path.iterdir())]
    assert len(parts) == 2
    assert "SEED" in hyper_parameters(parts[0])
    said_again = "config/text_summary" in parts[1].Tags()["tensors"]
    assert said_again != (load and writes == 1)  # the first text was behind the checkpoint, if there was no write yet


def test_a_second_run_of_the_same_trainer_does_not_say_them_again(tmp_path):
    writer = TensorboardXWriter(tmp_path, settings=SETTINGS, config="A: 1")
    for iter in range(2):
        write(writer, iter, loss=1.0)
        writer.close()

    assert len(list(tmp_path.iterdir())) == 2
    assert len(texts(events_in(tmp_path))) == 1


def test_tensorboard_compares_the_settings_of_all_runs_and_takes_their_scalars_for_metrics(tmp_path):
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext

    for name, settings in {"a": {"SOLVER.BASE_LR": 0.5}, "b": {"SOLVER.BASE_LR": 1.0, "SEED": 3}}.items():
        writer = TensorboardXWriter(tmp_path / name, settings=settings)
        write(writer, 0, **{"total_loss": 1.0, "digits/top1": 50.0})
        writer.close()
    events = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    provider = MultiplexerDataProvider(events, str(tmp_path))
    backend, request = Context(SimpleNamespace(data_provider=provider)), RequestContext()

    contents = backend.hparams_metadata(request, experiment_id="")
    found = backend.experiment_from_metadata(request, "", True, contents, [])
    assert {info.name: info.differs for info in found.hparam_infos} == {"SOLVER.BASE_LR": True, "SEED": False}
    assert {info.name.tag for info in found.metric_infos} == {"total_loss", "digits/top1"}


@pytest.mark.parametrize("load", [True, False])
def test_images_and_histograms_of_a_resumed_run_do_not_overlap(tmp_path, load):
    def train(storage, writer, iters):
        """A write after every third iteration; a picture after every second."""
        with storage:
            for storage.iter in iters:
                if storage.iter % 2:
                    storage.put_image("image", torch.full((3, 2, 2), storage.iter / 10))
                    storage.put_histogram("weights", torch.arange(storage.iter + 1.0), bins=2)
                if storage.iter % 3 == 2:
                    writer.write()

    first, storage = TensorboardXWriter(tmp_path), EventStorage()
    train(storage, first, range(5))
    state, stored = first.state_dict(), storage.state_dict()
    train(storage, first, range(5, 9))
    first.close()
    second, storage = TensorboardXWriter(tmp_path), EventStorage()
    storage.load_state_dict(stored)
    if load:
        second.load_state_dict(state)
    train(storage, second, range(5, 12))
    second.close()

    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "histograms": 0}).Reload()
    for shown in (events.Images("image"), events.Histograms("weights")):
        assert [event.step for event in shown] == ([1, 3, 5, 7, 9, 11] if load else [1, 3, 5, 7, 3, 5, 7, 9, 11])
