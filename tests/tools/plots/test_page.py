"""The page: what stands on it, and how a browser shows it."""

import json
import re
from functools import partial

import pytest

from tests.tools.plots.browser import look_at, overlapping

ROWS = [{"iteration": 9, "t/top1": 80.0}, {"iteration": 19, "t/top1": 90.0, "test/t/top1": 85.0}]


@pytest.fixture(scope="module")
def make_page(load):
    def make_page(places):
        runs = load("plots.runs").read_runs(places)
        return load("plots.page").make_page(runs, load("plots.panels").choose_panels(runs))

    return make_page


@pytest.fixture(scope="module")
def page(make_page, three_runs):
    return make_page(three_runs)


def cells(page):
    """The text of each row of the tables."""
    rows = re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    return [
        [re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)]
        for row in rows
    ]


def test_the_page_names_nothing_outside_itself(page):
    sources = re.findall(r"""(?:src|href|action)\s*=\s*["']?([^"'\s>]{,40})""", page)
    assert {source.partition(",")[0] for source in sources} == {"data:image/png;base64"}
    # a name, not a place
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|<link|<iframe|fetch\(", page)
    assert "seed 0 &lt;b&gt;" in page  # a name is text, not HTML
    assert "<b>" not in page


def test_the_results_are_last_best_and_on_the_test_data_with_the_best_run_marked(
    make_page, write_run, tmp_path
):
    other = [{"iteration": 9, "t/top1": 88.0, "t/speed": 3.0}, {"iteration": 19, "t/top1": None}]
    page = make_page([write_run(tmp_path / "a", ROWS), write_run(tmp_path / "b", other)])
    assert cells(page) == [
        ["", "", "t · speed", "t · top1"],  # no columns in which no run has a value
        ["run", "iterations", "last", "last", "best", "test data"],
        ["a", "20", "-", "90", "90 after 20", "85"],
        ["b", "20", "3", "-", "88 after 10", "-"],
    ]
    assert re.findall(r"<mark>(.*?)</mark>", page) == ["90"]


def test_the_settings_that_differ_are_shown_and_no_others(make_page, write_run, tmp_path):
    configs = [
        "A: {LR: 0.1, SAME: 1}\nOUTPUT_DIR: a\n",
        "A: {LR: 0.2, SAME: 1, NEW: []}\nOUTPUT_DIR: b\n",
    ]
    places = [
        write_run(tmp_path / name, ROWS, config) for name, config in zip("ab", configs, strict=True)
    ]
    assert [row[:4] for row in cells(make_page(places))[1:]] == [
        ["run", "iterations", "A.LR", "A.NEW"],
        ["a", "20", "0.1", "-"],
        ["b", "20", "0.2", "[]"],
    ]


def test_a_confusion_matrix_is_shown_and_a_file_that_holds_none_is_left_out(
    make_page, write_run, tmp_path, caplog
):
    place = write_run(tmp_path / "a", ROWS)
    files = {
        "end": '{"class_names": ["cat", "<dog>"], "iteration": 20, "confusion": [[3, 1], [0, 4]]}',
        "large": json.dumps(
            {"class_names": [*range(31)], "iteration": 9, "confusion": [[*range(31)]] * 31}
        ),
        "bad1": '{"class_names": ["cat"], "confusion": [[3, 1]]}',
        "bad2": '{"class_names": ["cat"], "confusion": [["<b>"]]}',
        "bad3": "[" * 100_000,
    }
    for name, text in files.items():
        (tmp_path / f"a/confusion_{name}.json").write_text(text)

    page = make_page([place])

    assert re.findall(r"<h3>(.*?)</h3>", page)[-2:] == [
        "end, after 20 iterations",
        "large, after 10 iterations",
    ]
    assert cells(page)[-3:] == [
        ["", "cat", "&lt;dog&gt;"],
        ["cat", "3", "1"],
        ["&lt;dog&gt;", "", "4"],
    ]
    assert 'title="cat, predicted &lt;dog&gt;: 1"' in page
    assert "31 classes are too many to show." in page
    assert [f"confusion_bad{i}.json is left out" in caplog.text for i in (1, 2, 3)] == [True] * 3


def test_a_long_line_is_thinned_and_keeps_its_peaks_and_ends(load):
    points = [(i, float(i % 10)) for i in range(100_000)]
    points[54_321] = (54_321, 1e6)
    points[65_432] = (65_432, -1e6)
    thinned = load("plots.svg").thin(points)
    assert len(thinned) <= 500
    assert [
        thinned[0],
        thinned[-1],
        max(thinned, key=lambda p: p[1]),
        min(thinned, key=lambda p: p[1]),
    ] == [points[i] for i in (0, -1, 54_321, 65_432)]
    assert thinned == sorted(set(thinned))


@pytest.fixture
def look(load, tmp_path):
    browser = load("plots.browser")
    if browser.find_chromium() is None:
        pytest.skip("needs chromium")
    return partial(look_at, browser.run_chromium, file=tmp_path / "page.html")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1600, False), (1000, True), (500, False)])
def test_no_texts_overlap_and_nothing_is_loaded_or_fails(page, look, width, dark):
    script = """
      document.querySelectorAll("details").forEach((element) => (element.open = true));
      const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
      const outside = texts().filter((text) => text[1] < 0 && !text[0].startsWith("-"));
      const overCurves = [...document.querySelectorAll(".panel > svg")].flatMap((svg) => {
        const base = svg.querySelector(".base").getBoundingClientRect();
        const boxes = [...svg.querySelectorAll(":scope > text")].map((text) => text.getBoundingClientRect());
        return boxes.filter((box) => box.top < base.top - 10 && box.right > base.left);
      });
      return [texts(), isDark, innerWidth, document.documentElement.scrollWidth, [...outside, ...overCurves]];
    """
    seen = look(page, script=script, width=width, dark=dark)
    texts, is_dark, inner_width, page_width, misplaced = seen["result"]

    assert (seen["loaded"], seen["problems"]) == ([], [])
    assert {
        "training loss",
        "iterations",
        "grad_norm",
        "10k",
        "Settings that differ, and results",
    } <= {text[0] for text in texts}
    assert overlapping(texts) == []
    assert (is_dark, inner_width, page_width, misplaced) == (dark, width, width, [])

    if width == 1600:  # the control
        worse = page.replace(
            "</main>", '<img src="https://example.org/a.png"></main><script>absent()</script>'
        )
        seen = look(
            worse, script='document.querySelector("h2").style.marginTop = "-30px"; return texts();'
        )
        assert "Uncaught ReferenceError: absent is not defined" in seen["problems"]
        assert "refused https://example.org/a.png" in seen["problems"]
        assert overlapping(seen["result"])


@pytest.mark.slow
def test_values_are_shown_under_the_pointer_and_a_run_can_be_hidden(
    make_page, write_run, tmp_path, look
):
    other = [{"iteration": 9, "t/top1": 70.0}, {"iteration": 100, "t/top1": 95.25}]
    page = make_page([write_run(tmp_path / "a", ROWS), write_run(tmp_path / "b", other)])
    script = """
      const svg = document.querySelector(".panel > svg");
      const tip = () => [...document.querySelectorAll(".tip, .tip div")].map((element) => element.innerText.trim());
      const move = (mark) => {
        const box = svg.querySelectorAll(".mark")[mark].getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.x + box.width / 2, clientY: box.y }));
        return tip().slice(1).map((text) => text.replace(/\\s*\\n\\s*/, ": "));
      };
      const shown = [move(0), move(3)];
      document.getElementById("show0").click();
      const hidden = [move(2), getComputedStyle(document.querySelector("tr.run0")).display];
      svg.dispatchEvent(new PointerEvent("pointerleave"));
      return { shown, hidden, left: tip() };
    """
    assert look(page, script=script) == {
        "result": {
            "shown": [
                ["a · top1: 80", "b · top1: 70", "a · top1 · test data: 85 after 20"],
                ["b · top1: 95.25"],
            ],
            "hidden": [["b · top1: 70"], "none"],
            "left": [],
        },
        "loaded": [],
        "problems": [],
    }


@pytest.mark.slow
def test_eight_runs_fit_and_their_rows_are_sorted_by_a_click(make_page, write_run, tmp_path, look):
    places = []
    for i in range(8):
        settings = "".join(f"  SETTING_NUMBER_{j}: {i * j}\n" for j in range(14))
        rows = [
            {"iteration": n, **{f"t{k}/top1": 90.0 + i % 5 + n for k in range(5)}} for n in (9, 19)
        ]
        rows[0] |= {"t4/top1": 50.0 + (i + 3) % 8}
        places.append(write_run(tmp_path / f"run_number_{i}", rows, f"SOLVER:\n{settings}"))
    script = """
      const tables = [...document.querySelectorAll(".sheet table")];
      const scrolled = [document.documentElement, ...document.querySelectorAll(".wide")].filter(
        (element) => element.scrollWidth > element.clientWidth);
      const name = (row) => row.cells[0].innerText.at(-1);
      const names = () => tables.map((table) => [...table.tBodies[0].rows].map(name).join(""));
      const buttons = [...document.querySelectorAll(".sub button")];
      const button = buttons.find((button) => button.innerText.endsWith("NUMBER_3"));
      const orders = [names()];
      for (let i = 0; i < 2; i++) {
        button.click();
        orders.push(names());
      }
      document.querySelectorAll(".sub[data-down] button")[0].click();
      orders.push(names());
      return [scrolled.length, orders.map((order) => [...new Set(order)]), tables.length > 1];
    """
    seen = look(make_page(places), script=script)

    assert seen["problems"] == []
    # by the last value of top1, with the largest first; equal runs stay in their order
    assert seen["result"] == [0, [["01234567"], ["01234567"], ["76543210"], ["43271605"]], True]
