"""The tool as it is called."""

import importlib.util
import sys

import pytest

ROWS = [{"iteration": 19, "total_loss": 1.0}, {"iteration": 39, "total_loss": 0.5}]


@pytest.fixture
def plot(load):
    tool = load("plot_metrics")
    return lambda *args: tool.main(tool.parse_args([str(arg) for arg in args]))


def test_the_picture_goes_into_the_folder_of_the_first_run(plot, load, write_run, tmp_path):
    pytest.importorskip("matplotlib")
    first, second = write_run(tmp_path / "a", ROWS), write_run(tmp_path / "b", ROWS)
    assert plot(first, second) == [tmp_path / "a/metrics.png"]
    assert (tmp_path / "a/metrics.png").read_bytes()[:4] == b"\x89PNG"
    plot(first, "--output", tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_bytes()[:5] == b"<?xml"
    with pytest.raises(load("plots.runs").RunError, match="cannot write .*x.doc.*: .*png.*svg"):
        plot(first, "--output", tmp_path / "x.doc")


def test_a_page_needs_no_matplotlib(plot, write_run, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plot(write_run(tmp_path / "a", ROWS), "--html", tmp_path / "x.html") == [
        tmp_path / "x.html"
    ]
    assert not (tmp_path / "a/metrics.png").exists()


def test_an_error_of_the_command_is_one_line_and_exit_code_2(load, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plot_metrics.py", "nowhere", "--html", "x.html"])

    with pytest.raises(SystemExit) as exit:
        load("plot_metrics").invoke_main()

    assert exit.value.code == 2
    assert capsys.readouterr() == (
        "",
        "error: there is no run at 'nowhere'; give an output folder with a metrics.json, or such a file\n",
    )
