"""What the benchmark measures and prints; never how long something takes."""

import importlib
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from trainkit.projects.non_finite.policies import SkipNonFinite

from trainkit.engine import AMPTrainer
from trainkit.solver.clipping import GradientClipper
from trainkit.utils.events import EventStorage

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    """The script, imported as it is where it is started: from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield importlib.import_module("benchmark")


@pytest.fixture(scope="module")
def modules(tool):
    """Imports a module of the benchmark."""
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_a_ratio_is_the_median_of_those_within_the_rounds_and_its_spread_their_middle_half(modules):
    measure = modules("measure")

    def twin():
        raise NotImplementedError

    # ratios 2, 3, 1.25, 9, 1; the ratio of the medians would be 1.25
    found = {
        "by hand": [1e-3, 10e-3, 4e-3, 1e-3, 6e-3],
        "trainkit": [2e-3, 30e-3, 5e-3, 9e-3, 6e-3],
    }
    memory = {"by hand": [0.0], "trainkit": [29.25]}

    table = measure.as_table(
        [
            measure.Comparison("a step", twin, found),
            measure.Comparison("memory", twin, memory, "MiB"),
        ]
    )

    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert lines[0] == ["work", "way", "median", "ratio", "half of the ratios"]
    assert lines[2] == ["a step", "by hand", "4.00 ms", "1.00", ""]
    assert lines[3] == ["", "trainkit", "6.00 ms", "2.00", "1.25 to 3.00"]
    assert lines[4] == ["memory", "by hand", "0.00 MiB", "", ""]
    assert lines[5] == ["", "trainkit", "29.2 MiB", "", ""]


def test_each_round_calls_each_way_once_in_turned_order_and_the_first_round_does_not_count(modules):
    measure = modules("measure")
    calls = []

    def way(name):
        calls.append(name)
        return float(len(calls))

    found = measure.alternate({"a": lambda: way("a"), "b": lambda: way("b")}, 2)

    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


# ---------------------------------------------------------------------------- equal work


def trainers(job):
    """name -> the class of the loop by hand, and the trainer, which gets a folder."""
    amp = {"trainer_class": AMPTrainer, "precision": torch.bfloat16}
    return {
        "simple": ("HandWrittenLoop", job.simple_trainer),
        "default": ("HandWrittenLoop", job.default_trainer),
        "asynchronous": (
            "HandWrittenLoop",
            partial(job.simple_trainer, async_write_metrics=True),
        ),
        "amp": ("HalfPrecisionLoop", partial(job.simple_trainer, **amp)),
        "accumulation": ("AccumulatingLoop", partial(job.simple_trainer, accumulation_steps=4)),
        "skip": ("SkippingLoop", partial(job.simple_trainer, non_finite=SkipNonFinite())),
    }


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def same_weights(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def assert_same_losses(lines, expected):
    assert [line["iteration"] for line in lines] == [19, 39, 59]
    for line, other in zip(lines, expected, strict=True):
        for name in ("total_loss", "loss_mse", "loss_l1"):
            assert line[name] == pytest.approx(other[name], rel=1e-6)


@pytest.mark.parametrize(
    "name", ["simple", "default", "asynchronous", "amp", "accumulation", "skip"]
)
def test_the_loop_by_hand_and_the_trainer_get_the_same_weights_and_write_the_same_losses(
    modules, tmp_path, name
):
    job = modules("job")
    loop_class, make = trainers(job)[name]
    with job.logging_to(tmp_path):
        loop = getattr(modules("by_hand"), loop_class)(job.make_model(), tmp_path / "by_hand")
        trainer = make(tmp_path / "trainer")
        job.Chunks(trainer)(40)
        loop(39)
        # one step more makes a difference
        assert not same_weights(trainer.model, loop.model)

        loop.step()

    assert same_weights(trainer.model, loop.model)
    by_hand = lines_of(tmp_path / "by_hand")
    of_trainer = lines_of(tmp_path / "trainer")
    assert_same_losses(of_trainer, by_hand)
    assert of_trainer[-1].keys() - by_hand[-1].keys() <= {"rank_data_time"}
    assert of_trainer[-1]["lr"] == pytest.approx(by_hand[-1]["lr"], rel=1e-6)
    console = (tmp_path / "log.txt").read_text()
    # three lines of each; a trainer may write once more when it is stopped
    assert console.count("total_loss: ") in (6, 7)


def test_the_bare_loop_gets_the_weights_of_the_loop_by_hand(modules, tmp_path):
    job = modules("job")
    by_hand = modules("by_hand")
    loop = by_hand.HandWrittenLoop(job.make_model(), tmp_path)
    bare = by_hand.BareLoop(job.make_model())
    loop(30)
    bare(29)
    assert not same_weights(bare.model, loop.model)

    bare.step()

    assert same_weights(bare.model, loop.model)


@pytest.mark.filterwarnings("default")  # of the other libraries, where they are installed
def test_other_libraries_write_the_losses_of_the_loop_by_hand(modules, tmp_path):
    job = modules("job")
    peers = modules("peers")
    with job.logging_to(tmp_path):
        modules("by_hand").HandWrittenLoop(job.make_model(), tmp_path / "by_hand")(40)
        for module in peers.PEERS.values():
            make = peers.find(module)
            if make is not None:
                make(tmp_path / module)(40)

    found = [path.parent for path in tmp_path.glob("*/metrics.json")]
    assert tmp_path / "detectron2" in found  # it needs only fvcore
    for folder in found:
        assert_same_losses(lines_of(folder), lines_of(tmp_path / "by_hand"))


def test_the_passes_by_hand_give_the_losses_of_the_evaluator(modules):
    evaluation = modules("evaluation")
    model = evaluation.Classifier()
    batches = modules("job").make_batches(5, size=4)
    by_hand = evaluation.evaluate_by_hand(model, batches)
    assert by_hand.keys() == {"total_loss", "loss_mse", "loss_l1"}
    assert evaluation.evaluate(model, batches) == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("clip_type", ["value", "norm", "full_model"])
def test_what_is_clipped_by_hand_is_what_the_clipper_clips(modules, monkeypatch, clip_type):
    clipping = modules("clipping")
    limit = 0.5  # so that gradients change
    monkeypatch.setattr(clipping, "LIMIT", limit)
    by_hand = clipping.make_parameters(3, 4)
    clipped = clipping.make_parameters(3, 4)
    for place in range(3):
        gradient = torch.randn(4, 4, generator=torch.Generator().manual_seed(place))
        by_hand[place].grad = gradient.clone()
        clipped[place].grad = gradient.clone()

    clipping.TWINS[clip_type](by_hand)
    GradientClipper(clip_type, limit)(clipped)

    for mine, theirs in zip(by_hand, clipped, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
        assert mine.grad.abs().max() <= limit


def test_what_is_saved_and_copied_by_hand_is_what_the_trainer_saves(modules, tmp_path):
    save = modules("save")
    trainer = save.train(save.OneLayerTrainer, 3, [save.PutScalars(5)], tmp_path / "run")
    rest = save.Rest(trainer)
    memory = {}
    trainer.request_save("model")
    save.save_by_hand(trainer, rest, tmp_path / "by_hand.pth")
    save.copy_by_hand(trainer, rest, memory)

    assert (tmp_path / "last_checkpoint").read_text() == "by_hand.pth"
    saved = torch.load(tmp_path / "run/model.pth", weights_only=True)
    by_hand = torch.load(tmp_path / "by_hand.pth", weights_only=True)
    assert saved["model"].keys() == by_hand["model"].keys()
    for name, tensor in saved["model"].items():
        assert torch.equal(tensor, by_hand["model"][name])
        assert torch.equal(tensor, memory[f".model.{name}"])
    of_trainer = saved["trainer"]
    moments = of_trainer["_trainer"]["optimizer"]["state"]
    assert moments.keys() == by_hand["optimizer"]["state"].keys() != set()
    rest = by_hand["rest"]
    [group] = of_trainer["_trainer"]["optimizer_groups"]
    assert rest["parameters"] == dict(zip(group["names"], group["shapes"], strict=True))
    for name in ("python", "numpy"):
        assert torch.equal(rest["random"][name], of_trainer["rng"][name][1])
    assert torch.equal(rest["random"]["torch"], of_trainer["rng"]["torch"])
    assert rest["others"]["trainer"].keys() == of_trainer.keys() - {"rng"}
    histories = rest["histories"]
    assert histories.keys() == of_trainer["storage"]["histories"].keys()
    for name, history in of_trainer["storage"]["histories"].items():
        values, iterations = histories[name]
        assert torch.equal(values, history["values"])
        assert torch.equal(iterations, history["iterations"])
    assert {f"scalar_{n}" for n in range(5)} <= histories.keys()


def test_a_model_that_is_not_finite_is_found_by_hand(modules):
    are_finite = modules("by_hand").are_finite
    tensors = [torch.ones(3), torch.ones(2, 2)]
    assert are_finite(tensors)
    tensors[1][0, 1] = float("nan")
    assert not are_finite(tensors)


# ---------------------------------------------------------------------------- sections


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the other libraries, where they are installed
@pytest.mark.parametrize(
    "name",
    [
        "step",
        "save",
        "load",
        "evaluation",
        "clipping",
        "scalars",
        "samples",
        "ranks",
        "start",
        "resume",
        "gpu",
    ],
)
def test_each_section_is_measured_and_each_of_its_rows_has_a_twin(
    tool, tmp_path, forked_ranks, name
):
    section = tool.SECTIONS[name]
    measure = importlib.import_module("benchmarks.measure")

    comparisons = section.measure(1, tmp_path, quick=True)

    assert comparisons
    assert section.ROUNDS > 1
    for comparison in comparisons:
        first, *others = comparison.found
        assert first == measure.by_hand(comparison.twin)
        assert others
        assert comparison.twin.__module__.startswith("benchmarks.")
        source = importlib.import_module(comparison.twin.__module__)
        assert getattr(source, comparison.twin.__name__) is comparison.twin
        for values in comparison.found.values():
            assert len(values) == 1
            assert values[0] > 0 or comparison.unit == "MiB"


@pytest.mark.slow
def test_the_resumed_runs_stand_where_they_say(modules, tmp_path):
    modules("resume").measure(1, tmp_path, quick=True)
    for iterations, held in ((1000, 1000), (10, 12)):  # and one more in each of two rounds
        (path,) = (tmp_path / f"{iterations}_0").glob("*.pth")
        state = torch.load(path, weights_only=True)["trainer"]
        storage = EventStorage()
        storage.load_state_dict(state["storage"])
        assert state["iteration"] == iterations + 1
        assert state["data"]["position"] == (iterations + 2) * 16
        assert len(storage.history("total_loss").values()) >= held


def test_the_page_has_what_was_measured_where_and_a_table_per_section(tool, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = []

    def measure_clipping(rounds, scratch, quick):
        asked.append(rounds)
        assert scratch.is_dir()
        assert not quick
        return clipping(rounds, scratch, True)

    clipping = tool.SECTIONS["clipping"].measure
    monkeypatch.setattr(tool.SECTIONS["clipping"], "measure", measure_clipping)

    parts = list(tool.measure(tool.parse_args(["clipping", "gpu", "--rounds", "2"])))

    assert asked == [2]
    assert f"torch {torch.__version__}" in parts[0]
    assert "no GPU" in parts[0]
    assert parts[1] == "## clipping"
    assert "by hand (`clipping.clip_value_by_hand`)" in parts[3]
    assert parts[4] == "## gpu"
    assert "no GPU" in parts[6]


def test_a_wrong_section_is_refused_with_the_names_of_all(tool, capsys):
    with pytest.raises(SystemExit):
        tool.parse_args(["steps"])
    assert "there is no section 'steps'; there are step, save" in capsys.readouterr().err
