"""What a run was made of, in TensorBoard's tabs HPARAMS and TEXT, and what a resumed one shows there."""

import io
import sys
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.backend_context import Context
from torch.utils.tensorboard import SummaryWriter

from tests.utils.imports import imported_by_writing
from trainkit.utils.events import EventStorage, TensorboardXWriter

SETTINGS = {"SOLVER.BASE_LR": 0.5, "SEED": 3, "MODEL.NAME": "Net", "FLAG": True, "DATASETS.VAL": ["a"], "NONE": None}


pytestmark = pytest.mark.usefixtures("seconds")


def events_in(folder):
    events = EventAccumulator(str(folder))
    return events.Reload()


def event_files(folder):
    """Those that TensorBoard reads, in the order of time."""
    return sorted(path for path in folder.iterdir() if "tfevents" in path.name)


def hyper_parameters(events):
    contents = events.PluginTagToContent("hparams")
    assert list(contents) == [metadata.SESSION_START_INFO_TAG]
    return dict(metadata.parse_session_start_info_plugin_data(contents[metadata.SESSION_START_INFO_TAG]).hparams)


def texts(events):
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors("config/text_summary")]


def full(*args):
    raise OSError(28, "No space left on device")


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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
    state = through_a_file(first.state_dict())
    write(first, writes, loss=2.0)
    first.close()

    second = TensorboardXWriter(tmp_path, settings={"SEED": 4}, config="B: 2")
    if load:
        second.load_state_dict(state)
    write(second, writes, loss=2.0)
    second.close()

    parts = [events_in(path) for path in event_files(tmp_path)]
    said = [(hyper_parameters(part)["SEED"].number_value, texts(part)) for part in parts if part.Tags()["tensors"]]
    old, new = (3, [(0, "    A: 1")]), (4, [(0, "    B: 2")])
    # the first text was behind the checkpoint, if there was no write yet
    assert said == (([old] if writes else [new]) if load else [old, new])


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


# ---------------------------------------------------------------------- what a kill leaves


def evaluate(storage, writer, iters):
    """A loss at each iteration; an evaluation and a write after every third one."""
    with storage:
        for storage.iter in iters:
            storage.put_scalar("loss", storage.iter / 8, smoothing_hint=False)
            if storage.iter % 3 == 2:
                # two in an epoch
                storage.put_scalar("top1", storage.iter * 2.0, smoothing_hint=False, epoch=(storage.iter + 1) // 6)
                writer.write()


def points(events):
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def tensors(folder):
    """As TensorBoard itself reads them, where it has no server of its own for that."""
    events = PluginEventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, *e.tensor_proto.float_val) for e in events.Tensors(tag)] for tag in ("loss", "top1")}


@pytest.mark.parametrize("load", [True, False])
@pytest.mark.parametrize("kills", [1, 2])
def test_a_run_that_is_killed_and_resumed_has_each_point_once_also_over_epochs(tmp_path, kills, load):
    whole = TensorboardXWriter(tmp_path / "whole")
    evaluate(EventStorage(), whole, range(18))
    whole.close()
    out = tmp_path / "out"
    writer, storage = TensorboardXWriter(out), EventStorage()
    evaluate(storage, writer, range(9))
    state, stored = through_a_file(writer.state_dict()), through_a_file(storage.state_dict())
    evaluate(storage, writer, range(9, 12))
    writer.close()
    for kill in range(kills):
        writer, storage = TensorboardXWriter(out), EventStorage()
        storage.load_state_dict(stored)
        if load:
            writer.load_state_dict(state)
        evaluate(storage, writer, range(9, 15 + 3 * (kill + 1 == kills)))
        writer.close()

    expected = points(events_in(tmp_path / "whole"))
    assert expected["top1"] == [(0, 4.0), (1, 10.0), (1, 16.0), (2, 22.0), (2, 28.0), (3, 34.0)]
    assert (points(events_in(out)) == expected) == load
    assert (tensors(out) == tensors(tmp_path / "whole")) == load


def test_events_after_the_checkpoint_are_kept_where_tensorboard_does_not_look_and_others_are_left_alone(
    tmp_path, caplog
):
    caplog.set_level("INFO")
    own = SummaryWriter(tmp_path)
    first = TensorboardXWriter(tmp_path)
    write(first, 0, loss=1.0)
    state = first.state_dict()
    write(first, 1, loss=2.0)
    state_later = first.state_dict()
    first.close()
    later = TensorboardXWriter(tmp_path)
    later.load_state_dict(state_later)
    write(later, 2, loss=3.0)
    later.close()
    own.add_scalar("mine", 5.0, 9)
    own.close()
    [others, cut, removed] = event_files(tmp_path)
    before = {path: path.read_bytes() for path in (others, cut, removed)}
    second = TensorboardXWriter(tmp_path)
    second.load_state_dict(state)
    assert {path: path.read_bytes() for path in event_files(tmp_path)} == before
    write(second, 1, loss=2.0)
    second.close()

    length = state["sizes"][cut.name]
    assert [path.name for path in event_files(tmp_path)[:2]] == [others.name, cut.name]
    assert not removed.exists()
    assert (others.read_bytes(), cut.read_bytes()) == (before[others], before[cut][:length])
    assert (tmp_path / "events.cut_1").read_bytes() == before[cut][length:] != b""
    assert (tmp_path / "events.cut_2").read_bytes() == before[removed]
    assert [(event.step, event.value) for event in events_in(tmp_path).Scalars("loss")] == [(0, 1.0), (1, 2.0)]
    assert [record.getMessage() for record in caplog.records if record.name.startswith("trainkit")] == [
        f"{cut} is cut at byte {length}; the later events are in events.cut_1",
        f"{removed} is cut at byte 0; the later events are in events.cut_2",
    ]


@pytest.mark.parametrize("suffix", ["", ".x"])
def test_files_of_another_run_in_the_same_folder_are_left_alone(tmp_path, suffix):
    first, other = (TensorboardXWriter(tmp_path, filename_suffix=suffix) for _ in range(2))
    write(first, 0, loss=1.0)
    state = first.state_dict()
    first.close()
    write(other, 1, loss=2.0)
    other.close()
    before = {path: path.read_bytes() for path in event_files(tmp_path)}

    resumed = TensorboardXWriter(tmp_path, filename_suffix=suffix)
    resumed.load_state_dict(state)
    write(resumed, 1, loss=3.0)
    resumed.close()
    after = {path: path.read_bytes() for path in event_files(tmp_path)}
    assert after.items() > before.items()
    assert all(path.name.endswith(suffix) for path in after)


def test_a_checkpoint_before_the_first_write_of_a_resumed_run_stands_where_the_first_one_did(tmp_path):
    first = TensorboardXWriter(tmp_path)
    write(first, 0, loss=1.0)
    state = first.state_dict()
    write(first, 1, loss=2.0)
    first.close()
    second = TensorboardXWriter(tmp_path)
    second.load_state_dict(state)

    assert second.state_dict() == state
    write(second, 1, loss=2.0)
    assert second.state_dict()["sizes"] == {path.name: path.stat().st_size for path in event_files(tmp_path)}
    second.close()


def test_events_for_which_there_is_no_room_beside_stay_until_there_is(tmp_path, monkeypatch):
    first = TensorboardXWriter(tmp_path)
    write(first, 0, loss=1.0)
    state = first.state_dict()
    write(first, 1, loss=2.0)
    first.close()
    [path] = event_files(tmp_path)
    before = path.read_bytes()
    second = TensorboardXWriter(tmp_path)
    second.load_state_dict(state)
    with monkeypatch.context() as disk:
        disk.setattr("shutil.copyfileobj", full)
        with pytest.raises(OSError, match="No space left on device"):
            write(second, 1, loss=2.0)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == {path: before}
    write(second, 2, loss=3.0)
    second.close()

    assert [event.step for event in events_in(tmp_path).Scalars("loss")] == [0, 1, 2]
    assert (tmp_path / "events.cut_1").read_bytes() == before[state["sizes"][path.name] :]


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


# ---------------------------------------------------------------------- imports


@pytest.mark.slow
def test_after_the_begin_of_training_a_write_imports_nothing(tmp_path):
    writer = 'TensorboardXWriter({!r}, settings={{"SEED": 3, "MODEL.NAME": "Net"}}, config="A: 1")'

    assert imported_by_writing(writer.format("started"), tmp_path, started=True)[1] == []
    assert "torch.utils.tensorboard" in imported_by_writing(writer.format("other"), tmp_path, started=False)[1]
    for folder in ("started", "other"):
        assert [*(tmp_path / folder).iterdir()]


def test_a_package_that_cannot_be_imported_is_found_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    with pytest.raises(ImportError, match=r"torch\.utils\.tensorboard"):
        TensorboardXWriter(tmp_path).begin(None)
