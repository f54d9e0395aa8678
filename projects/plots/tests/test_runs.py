"""What is read of a run."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from trainkit.projects.plots.runs import RunError, read_runs, shortest_names

ROOT = Path(__file__).parents[3]


def points(series):
    values = [None if math.isnan(value) else value for value in series.values.tolist()]
    return [*zip(series.done.tolist(), values, strict=True)]


def test_a_value_has_the_iterations_done_and_what_a_resumed_run_did_again_replaces_it(read):
    trained = [
        {"iteration": i, "lr": 0.1, **({"t/top1": i} if i == 19 else {})} for i in (9, 19, 29)
    ]
    end = {"iteration": 30, "t/top1": 90, "test/t/top1": 91, "accuracy": 80}
    (run,) = read([{"iteration": 0, "t/top1": 5}, *trained, end])
    assert points(run.series["t/top1"]) == [(0, 5), (20, 19), (30, 90)]
    assert points(run.series["test/t/top1"]) == [(30, 91)]
    assert points(run.series["accuracy"]) == [(30, 80)]
    assert run.num_done == 30

    (run,) = read(
        [{"iteration": i, "x": v} for i, v in [(0, 1), (1, 2), (2, 3), (1, 20), (2, 30), (3, 40)]]
    )
    assert points(run.series["x"]) == [(1, 1), (2, 20), (3, 30), (4, 40)]


def test_values_that_are_not_finite_are_gaps_and_what_is_no_number_is_left_out(read):
    text = {"text": "a", "flag": True}
    rows = [{"iteration": 9, "x": None, "epoch": 1}, {"iteration": 19, "x": float("nan"), **text}]
    rows += [{"iteration": 24, "x": float("inf")}, {"iteration": 29, "x": 1}]
    (run,) = read(rows)
    assert {*run.series} == {"x"}
    assert points(run.series["x"]) == [(10, None), (20, None), (25, None), (30, 1)]


def test_a_line_that_cannot_be_parsed_is_left_out_with_a_warning(tmp_path, caplog):
    lines = [
        '{"iteration": 39, "x"',
        "[" * 100_000,
        '{"iteration": ' + "9" * 5000 + "}",
        '{"iteration": NaN, "x": 2}',
        '{"iteration": 1e300, "x": 2}',
        '{"iteration": -4, "x": 2}',
        '{"iteration": "1", "x": 2}',
    ]
    good = '{"iteration": 1, "loss": 2.0, "large": ' + "9" * 400 + "}"
    (tmp_path / "metrics.json").write_text("\n".join([*lines, good, ""]))
    (run,) = read_runs([str(tmp_path)])
    assert {*run.series} == {"loss"}
    assert points(run.series["loss"]) == [(2, 2.0)]
    assert "lines without metrics are left out (7 lines, the first is line 1)" in caplog.text


def test_a_name_that_is_no_valid_text_is_shown_with_escapes(read):
    (run,) = read([{"iteration": 1, "a\ud800b": 1, "c\x00\x1b[31m\n": 2, "größe/精度": 3}])
    assert {*run.series} == {"a\\ud800b", "c\\x00\\x1b[31m\\n", "größe/精度"}


def test_a_run_without_metrics_is_left_out_with_a_warning(write_run, tmp_path, caplog):
    full = write_run(tmp_path / "full", [{"iteration": 1, "x": 1}])
    empty = write_run(tmp_path / "empty", [])
    assert [run.name for run in read_runs([empty, full])] == ["full"]
    assert f"{empty}/metrics.json has no metrics" in caplog.text


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (["nowhere"], "there is no run at 'nowhere'; give an output folder with a metrics.json"),
        (["empty"], "no metrics in .*empty/metrics.json"),
        (["binary.json"], "no metrics in .*binary.json"),
        (["full", "full/metrics.json"], "'full/metrics.json' is given twice"),
    ],
)
def test_what_cannot_be_shown_is_an_error_of_one_line(
    places, message, write_run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "full", [{"iteration": 1, "x": 1}])
    write_run(tmp_path / "empty", [])
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    with pytest.raises(RunError, match=message) as error:
        read_runs(places)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/one/a", "/two/a", "/two/b"], ["one/a", "two/a", "b"]),
        (["/x/1/a/run", "/y/1/a/run"], ["x", "y"]),
        (["/a", "/b/a"], ["/", "b"]),
    ],
)
def test_a_name_is_the_shortest_part_of_the_path_that_no_other_has(paths, names):
    assert shortest_names([Path(path) for path in paths]) == names


def test_runs_of_a_sweep_are_named_by_the_settings_that_differ(write_run, tmp_path):
    places = []
    for fold, lr in ((0, 0.01), (0, 0.03123456), (1, 0.01), (2, None)):
        rate = f"BASE_LR: {lr}, " if lr else ""  # the last run has not set it
        config = f"INPUT: {{FOLD: {fold}}}\nSOLVER: {{{rate}WARMUP: 2}}\n"
        folder = tmp_path / f"INPUT.FOLD={fold},SOLVER.BASE_LR={lr},SOLVER.WARMUP=2"
        places.append(write_run(folder, [{"iteration": 1, "x": 1}], config))
    names = ["FOLD=0 BASE_LR=0.01", "FOLD=0 BASE_LR=0.03123", "FOLD=1 BASE_LR=0.01", "FOLD=2"]
    assert [run.name for run in read_runs(places)] == names


def test_the_config_is_read_with_dotted_keys_and_one_that_cannot_be_read_is_a_warning(
    write_run, tmp_path, caplog
):
    rows = [{"iteration": 1, "x": 1}]
    text = "SOLVER: {BASE_LR: 0.001, GROUPS: {}}\nHOOKS: [{NAME: A}]\n"
    place = write_run(tmp_path / "a", rows, text)
    assert read_runs([place])[0].config == {
        "SOLVER.BASE_LR": 0.001,
        "SOLVER.GROUPS": {},
        "HOOKS": [{"NAME": "A"}],
    }
    for bad in ("a: [", "!!python/object/apply:os.system ['true']", "[" * 1200):
        place = write_run(tmp_path / "b", rows, bad)
        caplog.clear()
        assert read_runs([place])[0].config is None
        assert "config.yaml cannot be read" in caplog.text


def forked(parent, iteration):
    return f"FORK: {{RUN: {parent}, ITER: {iteration}, CHANGES: []}}\n"


def rows_of(*iters):
    return [{"iteration": iter, "x": iter} for iter in iters]


def test_the_parent_of_a_fork_is_drawn_up_to_the_fork(write_run, tmp_path):
    """Runs b and c are forks of a, d is one of c."""
    a = write_run(tmp_path / "a", rows_of(0, 10, 20, 30, 40))
    b = write_run(tmp_path / "b", rows_of(11, 21), forked(a, 10))
    c = write_run(tmp_path / "c", rows_of(25, 35), forked(a, 20))
    d = write_run(tmp_path / "d", rows_of(30), forked(c, 25))

    def seen(*places):
        return {run.name: run.series["x"].done.tolist() for run in read_runs(places)}

    assert seen(b) == {"b": [12, 22], "a up to 11": [1, 11]}
    assert seen(b, c) == {"b": [12, 22], "c": [26, 36], "a up to 21": [1, 11, 21]}
    assert seen(b, a) == {"b": [12, 22], "a": [1, 11, 21, 31, 41]}
    assert seen(d) == {"d": [31], "c up to 26": [26], "a up to 21": [1, 11, 21]}


MEMORY = """
import sys
from pathlib import Path
from trainkit.projects.plots.__main__ import main, parse_args
main(parse_args(sys.argv[1:]))
lines = Path("/proc/self/status").read_text().splitlines()
(peak,) = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
print(peak // 1024, "torch" in sys.modules)
"""


@pytest.mark.slow
def test_a_run_of_200_000_lines_needs_300_mb_and_no_torch(tmp_path):
    pytest.importorskip("plotly")
    values = np.random.default_rng(0).random((200_000, 6))
    names = ("total_loss", "lr", "time", "data_time", "eta_seconds", "rank_data_time")
    with (tmp_path / "metrics.json").open("w") as file:
        for iteration, row in enumerate(values.tolist()):
            file.write(json.dumps({"iteration": iteration, **dict(zip(names, row, strict=True))}))
            file.write("\n")
    command = [sys.executable, "-c", MEMORY, str(tmp_path), "-o", str(tmp_path / "x.html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    peak_mib, has_torch = done.stdout.split()
    assert int(peak_mib) < 300
    assert has_torch == "False"
    assert (tmp_path / "x.html").stat().st_size < 7e6
