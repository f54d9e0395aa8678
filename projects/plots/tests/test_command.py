"""The command as it is called."""

import sys

import pytest
from trainkit.projects.plots.__main__ import invoke_main, main, parse_args
from trainkit.projects.plots.runs import RunError

ROWS = [{"iteration": 19, "total_loss": 1.0}, {"iteration": 39, "total_loss": 0.5}]


def plot(*args):
    return main(parse_args([str(arg) for arg in args]))


def test_the_picture_goes_into_the_folder_of_the_first_run(write_run, tmp_path):
    pytest.importorskip("matplotlib")
    first = write_run(tmp_path / "a", ROWS)
    second = write_run(tmp_path / "b", ROWS)
    assert plot(first, second) == [tmp_path / "a/metrics.png"]
    assert (tmp_path / "a/metrics.png").read_bytes().startswith(b"\x89PNG")


def test_the_end_of_the_name_decides_what_is_written(write_run, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    run = write_run(tmp_path / "a", ROWS)
    paths = [tmp_path / "x.svg", tmp_path / "x.html"]
    assert plot(run, "-o", paths[0], "--html", paths[1]) == paths
    assert paths[0].read_text().startswith("<?xml")
    assert paths[1].read_text().startswith("<!DOCTYPE html>")
    assert not (tmp_path / "a/metrics.png").exists()
    with pytest.raises(RunError, match="cannot write .*x.doc.*: .*png.*svg"):
        plot(run, "--output", tmp_path / "x.doc")
    with pytest.raises(RunError, match="cannot write .*nowhere/x.html': No such file"):
        plot(run, "--output", tmp_path / "nowhere/x.html")


@pytest.mark.parametrize(
    ("package", "module", "file"),
    [("matplotlib", "picture", "x.png"), ("plotly.offline", "page", "x.html")],
)
def test_a_missing_package_is_named_before_anything_is_read(monkeypatch, package, module, file):
    monkeypatch.delitem(sys.modules, f"trainkit.projects.plots.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # an import of it fails
    name = package.partition(".")[0]
    with pytest.raises(RunError, match=rf"a {module} needs the package {name}: pip install"):
        plot("nowhere", "-o", file)


def test_an_error_of_the_command_is_one_line_and_exit_code_2(monkeypatch, capsys):
    pytest.importorskip("plotly")
    monkeypatch.setattr(sys, "argv", ["plots", "nowhere", "-o", "x.html"])

    with pytest.raises(SystemExit) as exit:
        invoke_main()

    assert exit.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: there is no run at 'nowhere'; ")
    assert captured.err.count("\n") == 1


def test_a_folder_whose_name_is_no_valid_text_is_shown(write_run, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    folder = tmp_path / "run\udcff"  # a byte that is no UTF-8
    place = write_run(folder, ROWS)
    page = tmp_path / "x.html"
    monkeypatch.setattr(sys, "argv", ["plots", place, "-o", str(folder / "x.png"), "-o", str(page)])

    invoke_main()

    assert "run\\udcff/x.png (" in capsys.readouterr().out
    assert "<h1>run\\udcff</h1>" in page.read_text()
