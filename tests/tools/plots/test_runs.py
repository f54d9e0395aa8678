"""What is read of a run."""

from pathlib import Path

import pytest


@pytest.fixture
def runs_module(load):
    return load("plots.runs")


def test_a_value_has_the_iterations_done_and_what_a_resumed_run_did_again_replaces_it(read):
    trained = [
        {"iteration": i, "lr": 0.1, **({"t/top1": i} if i == 19 else {})} for i in (9, 19, 29)
    ]
    (run,) = read(
        [
            {"iteration": 0, "t/top1": 5},
            *trained,
            {"iteration": 30, "t/top1": 90, "test/t/top1": 91},
        ]
    )
    assert run.series["t/top1"] == [(0, 5), (20, 19), (30, 90)]
    assert (run.series["test/t/top1"], run.num_done) == ([(30, 91)], 30)
    text = {"text": "a", "flag": True}
    rows = [{"iteration": 9, "x": None, "epoch": 1}, {"iteration": 19, "x": float("nan"), **text}]
    (run,) = read([*rows, {"iteration": 29, "x": 1}])
    assert run.series == {"x": [(10, None), (20, None), (30, 1)]}
    (run,) = read(
        [{"iteration": i, "x": v} for i, v in [(0, 1), (1, 2), (2, 3), (1, 20), (2, 30), (3, 40)]]
    )
    assert run.series == {"x": [(1, 1), (2, 20), (3, 30), (4, 40)]}


def test_a_line_that_cannot_be_parsed_is_left_out_with_a_warning(runs_module, tmp_path, caplog):
    lines = [
        '{"iteration": 39, "x"',
        "[" * 100_000,
        '{"iteration": ' + "9" * 5000 + "}",
        '{"iteration": NaN, "x": 2}',
    ]
    good = '{"iteration": 1, "loss": 2.0, "large": ' + "9" * 400 + "}"
    (tmp_path / "metrics.json").write_text("\n".join([*lines, good, ""]))
    (run,) = runs_module.read_runs([str(tmp_path)])
    assert run.series == {"loss": [(2, 2.0)]}
    assert "lines without metrics are left out (4 lines, the first is line 1)" in caplog.text


def test_a_run_without_metrics_is_left_out_with_a_warning(runs_module, write_run, tmp_path, caplog):
    full, empty = (
        write_run(tmp_path / "full", [{"iteration": 1, "x": 1}]),
        write_run(tmp_path / "empty", []),
    )
    assert [run.name for run in runs_module.read_runs([empty, full])] == ["full"]
    assert f"{empty}/metrics.json has no metrics" in caplog.text


def test_what_cannot_be_shown_is_an_error_of_one_line(
    runs_module, write_run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "full", [{"iteration": 1, "x": 1}])
    write_run(tmp_path / "empty", [])
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    for places, message in (
        (["nowhere"], "there is no run at 'nowhere'; give an output folder with a metrics.json"),
        (["empty"], "no metrics in .*empty/metrics.json"),
        (["binary.json"], "no metrics in .*binary.json"),
        (["full", "full/metrics.json"], "'full/metrics.json' is given twice"),
    ):
        with pytest.raises(runs_module.RunError, match=message) as error:
            runs_module.read_runs(places)
        assert "\n" not in str(error.value)


def test_a_name_is_the_shortest_part_of_the_path_that_no_other_has(runs_module):
    for paths, names in (
        (["/one/a", "/two/a", "/two/b"], ["one/a", "two/a", "b"]),
        (["/x/1/a/run", "/y/1/a/run"], ["x", "y"]),
        (["/a", "/b/a"], ["/", "b"]),
    ):
        assert runs_module.shortest_names([Path(path) for path in paths]) == names


def test_the_config_is_read_with_dotted_keys(runs_module, write_run, tmp_path):
    place = write_run(
        tmp_path,
        [{"iteration": 1, "x": 1}],
        "SOLVER: {BASE_LR: 1e-3, GROUPS: {}}\nHOOKS: [{NAME: A}]\n",
    )
    assert runs_module.read_runs([place])[0].config == {
        "SOLVER.BASE_LR": 1e-3,
        "SOLVER.GROUPS": {},
        "HOOKS": [{"NAME": "A"}],
    }


def forked(parent, iteration):
    return f"FORK: {{RUN: {parent}, ITER: {iteration}, CHANGES: []}}\n"


def points(*iters):
    return [{"iteration": iter, "x": iter} for iter in iters]


def test_the_parent_of_a_fork_is_drawn_up_to_the_fork(runs_module, write_run, tmp_path):
    """Runs b and c are forks of a, d is one of c."""
    a = write_run(tmp_path / "a", points(0, 10, 20, 30, 40))
    b = write_run(tmp_path / "b", points(11, 21), forked(a, 10))
    c = write_run(tmp_path / "c", points(25, 35), forked(a, 20))
    d = write_run(tmp_path / "d", points(30), forked(c, 25))

    def seen(*places):
        return {
            run.name: [iter for iter, _ in run.series["x"]] for run in runs_module.read_runs(places)
        }

    assert seen(b) == {"b": [12, 22], "a up to 11": [1, 11]}
    assert seen(b, c) == {"b": [12, 22], "c": [26, 36], "a up to 21": [1, 11, 21]}
    assert seen(b, a) == {"b": [12, 22], "a": [1, 11, 21, 31, 41]}
    assert seen(d) == {"d": [31], "c up to 26": [26], "a up to 21": [1, 11, 21]}
