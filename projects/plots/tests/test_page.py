"""The page: what stands on it, and how a browser shows it."""

import importlib
import json
import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("plotly")
page_module = importlib.import_module("trainkit.projects.plots.page")
panels_module = importlib.import_module("trainkit.projects.plots.panels")
runs_module = importlib.import_module("trainkit.projects.plots.runs")

ROWS = [{"iteration": 9, "t/top1": 80.0}, {"iteration": 19, "t/top1": 90.0, "test/t/top1": 85.0}]


def make_page(places):
    runs = runs_module.read_runs(places)
    return page_module.make_page(runs, panels_module.choose_panels(runs))


class Reader(HTMLParser):
    """What a browser would make of the page: its tags with attributes, tables, and other texts."""

    def __init__(self, html):
        super().__init__()
        self.tags = []
        self.texts = []
        self.marks = []
        self.tables = []
        self.is_in_cell = False
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
            self.is_in_cell = True

    def handle_endtag(self, tag):
        if tag in ("th", "td"):
            self.is_in_cell = False

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            return
        self.texts.append(data)
        if self.tags and self.tags[-1][0] == "mark" and data.strip():
            self.marks.append(data)
        if self.is_in_cell:
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def page(three_runs):
    return make_page(three_runs)


def test_the_results_are_last_best_and_on_the_test_data_with_the_best_run_marked(
    write_run, tmp_path
):
    other = [{"iteration": 9, "t/top1": 88.0, "t/speed": 3.0}, {"iteration": 19, "t/top1": None}]
    read = Reader(make_page([write_run(tmp_path / "a", ROWS), write_run(tmp_path / "b", other)]))
    assert read.tables[-1] == [
        ["", "", "t · speed", "t · top1"],  # no columns in which no run has a value
        ["run", "iterations", "last", "last", "best", "test data"],
        ["a", "20", "-", "90", "90 after 20", "85"],
        ["b", "20", "3", "-", "88 after 10", "-"],
    ]
    assert read.marks[0] == "90"


def test_the_settings_that_differ_are_shown_and_no_others(write_run, tmp_path):
    configs = [
        "A: {LR: 0.1, SAME: 1}\nOUTPUT_DIR: a\n",
        "A: {LR: 0.2, SAME: 1, NEW: []}\nOUTPUT_DIR: b\n",
    ]
    places = [
        write_run(tmp_path / name, ROWS, config) for name, config in zip("ab", configs, strict=True)
    ]
    table = Reader(make_page(places)).tables[-1]
    assert [row[:4] for row in table[1:]] == [
        ["run", "iterations", "A.LR", "A.NEW"],
        ["a", "20", "0.1", "-"],
        ["b", "20", "0.2", "[]"],
    ]


def test_each_chart_has_a_table_that_ends_with_the_last_value_of_each_line(three_runs, page):
    """The last values are read from the files, line by line."""
    lasts = []
    for folder in three_runs:
        last = {}
        with open(f"{folder}/metrics.json", encoding="utf-8") as lines:
            for line in lines:
                last |= json.loads(line)
        lasts.append(last)
    tables = [table for table in Reader(page).tables if table[0][0] == "after iterations"]
    titles = re.findall(r"<h3>(.*?)</h3>", page)[: len(tables)]
    by_title = dict(reversed([*zip(titles, tables, strict=True)]))  # the first of each title
    names = ["seed 0 <b>", "a_name_that_is_much_longer_than_the_others_and_goes_on", "short"]

    def last_in_table(title, head):
        head_row, *rows = by_title[title]
        column = head_row.index(head)
        return [row[column] for row in rows if row[column]][-1]

    for name, last in zip(names, lasts, strict=True):
        assert last_in_table("learning rate", name) == f"{last['lr']:.6g}"
    for name, last in zip(names[:2], lasts[:2], strict=True):
        for metric in ("total_loss", "loss_mask"):
            assert last_in_table("training loss", name + metric) == f"{last[metric]:.6g}"
        shown = last_in_table("sem_seg", name + "mIoUtest data")
        assert shown == f"{last['test/sem_seg/mIoU']:.6g}"
    assert last_in_table("training loss", "shorttotal_loss") == "-"
    assert all(len(table) <= 45 for table in tables)


def test_a_confusion_matrix_is_shown_and_a_file_that_holds_none_is_left_out(
    write_run, tmp_path, caplog
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
        "bad4": "[1]",
    }
    for name, text in files.items():
        (tmp_path / f"a/confusion_{name}.json").write_text(text)

    read = Reader(make_page([place]))

    assert "end, after 20 iterations" in read.texts
    assert "large, after 10 iterations" in read.texts
    assert read.tables[-1] == [["", "cat", "<dog>"], ["cat", "3", "1"], ["<dog>", "0", "4"]]
    assert "31 classes are too many for a table." in read.texts
    for number in (1, 2, 3, 4):
        assert f"confusion_bad{number}.json is left out" in caplog.text


def test_pictures_are_shown_but_none_to_which_a_link_leads_out_of_the_folder(
    three_runs, write_run, tmp_path
):
    texts = Reader(make_page(three_runs)).texts
    assert "digits (val), after 12000 iterations, batch 3" in texts
    place = write_run(tmp_path / "a", ROWS)
    folder = tmp_path / "a/visualization"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "secret.png").symlink_to(tmp_path / "secret.txt")
    assert "img" not in {tag for tag, _ in Reader(make_page([place])).tags}


# ---------------------------------------------------------------------------- in a browser


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(400, False), (400, True), (1280, False)])
def test_nothing_has_to_be_scrolled_sideways_and_nothing_fails(look, page, width, dark):
    shown = look(page, width, dark)
    shown.evaluate("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    assert shown.evaluate("document.documentElement.scrollWidth") == width
    assert shown.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == dark
    # the rows of runs are cards without a bar of their own
    bars = "[...document.querySelectorAll('.wide:has(.sheet)')].map((e) => e.scrollWidth - e.clientWidth)"
    if width == 400:
        assert shown.evaluate(bars) == [0] * len(shown.evaluate(bars))
    count = "document.querySelectorAll('.chart .scatterlayer .trace').length"
    assert shown.evaluate(count) > 10


CONTRASTS = """() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    const color = channels(getComputedStyle(element).backgroundColor);
    return color.length === 3 || color[3] > 0.99 ? color : ground(element.parentElement);
  };
  const found = [];
  const texts = "h1, h2, h3, p, span, td, th, summary, mark, .chart:not(.square) text";
  for (const element of document.querySelectorAll(texts)) {
    if (!element.textContent.trim() || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const ink = channels(element instanceof SVGElement ? style.fill : style.color);
    const [low, high] = [luminance(ink), luminance(ground(element))].sort((a, b) => a - b);
    found.push([(high + 0.05) / (low + 0.05), element.textContent]);
  }
  return found;
}"""


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_every_text_stands_out_from_its_ground(look, page, dark):
    """By the contrast of WCAG 2, which asks for 4.5."""
    shown = look(page, dark=dark)
    found = shown.evaluate(CONTRASTS)
    assert len(found) > 100
    assert [text for contrast, text in found if contrast < 4.5] == []
    ground = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 23, 27)") == dark


@pytest.mark.slow
def test_values_are_shown_under_the_pointer(look, write_run, tmp_path):
    other = [{"iteration": 9, "t/top1": 70.0}, {"iteration": 19, "t/top1": 95.25}]
    page = make_page([write_run(tmp_path / "a", ROWS), write_run(tmp_path / "b", other)])
    shown = look(page)
    box = shown.locator(".chart").first.bounding_box()
    shown.mouse.move(box["x"] + 0.95 * box["width"], box["y"] + 0.5 * box["height"])
    shown.wait_for_selector(".hoverlayer .legendtext")
    texts = shown.locator(".hoverlayer text").all_text_contents()
    assert texts == ["after 20 iterations", "a : 90", "b : 95.25", "a · test data : 85"]
    buttons = "[...document.querySelector('.chart').querySelectorAll('[data-title]')]"
    titles = shown.evaluate(f"{buttons}.map((button) => button.dataset.title)")
    assert titles[0] == "Download plot as a PNG"
    assert [
        title for title in titles if "hare" in title or "loud" in title
    ] == []  # nothing is sent


@pytest.mark.slow
def test_a_box_hides_a_run_everywhere(look, three_runs, page):
    shown = look(page)
    visible = """() => document.querySelectorAll('.chart .scatterlayer .trace').length"""
    pictures = shown.locator(".pictures").first
    before = shown.evaluate(visible)
    assert pictures.is_visible()
    shown.locator("[data-run='0']").uncheck()
    assert shown.evaluate(visible) < before
    assert not pictures.is_visible()
    hidden = """() => [...document.querySelectorAll('.chart')]
      .flatMap((chart) => chart.data.filter((trace) => trace.visible === false))
      .map((trace) => trace.meta)"""
    assert set(shown.evaluate(hidden)) == {0}
    shown.locator("[data-run='0']").check()
    assert shown.evaluate(visible) == before


@pytest.mark.slow
def test_the_axis_is_switched_between_linear_and_logarithmic(look, write_run, tmp_path):
    rows = [{"iteration": i, "total_loss": 10.0 / (1 + i), "t/acc": -1.0} for i in range(50)]
    shown = look(make_page([write_run(tmp_path / "a", rows)]))
    axis = """() => {
      const { type, range } = document.querySelector(".chart")._fullLayout.yaxis;
      return [type, ...range];
    }"""
    log = shown.evaluate(axis)
    assert log[0] == "log"
    assert log[1] < -0.69  # log10 of 10 / 50
    assert log[2] > 0.99
    boxes = shown.locator(".log input")
    assert boxes.nth(0).is_checked()
    boxes.nth(0).uncheck()
    linear = shown.evaluate(axis)
    assert linear[0] == "linear"
    assert linear[1] < 0.2
    boxes.nth(0).check()
    assert shown.evaluate(axis) == log
    assert boxes.nth(1).is_disabled()  # all values are negative


@pytest.mark.slow
def test_a_part_is_zoomed_in_by_dragging_and_a_double_click_shows_all(look, page):
    shown = look(page)
    box = shown.locator(".chart").first.bounding_box()
    width = "() => { const [a, b] = document.querySelector('.chart')._fullLayout.xaxis.range; return b - a; }"
    whole = shown.evaluate(width)
    middle = box["y"] + 0.5 * box["height"]
    shown.mouse.move(box["x"] + 0.4 * box["width"], middle)
    shown.mouse.down()
    shown.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=5)
    shown.mouse.up()
    assert shown.evaluate(width) < 0.5 * whole
    shown.mouse.dblclick(box["x"] + 0.5 * box["width"], middle)
    shown.wait_for_function(f"({width})() === {whole}")


@pytest.mark.slow
def test_rows_are_sorted_by_a_click_and_runs_without_a_value_come_last(look, write_run, tmp_path):
    places = []
    for number, value in enumerate([9.0, 10.5, None, 1.0]):
        rows = [{"iteration": i, "t/top1": value, "u/acc": 1.0} for i in range(3)]
        places.append(write_run(tmp_path / f"run{number}", rows))
    shown = look(make_page(places))

    def order():
        return [text.strip()[-1] for text in shown.locator(".sheet tbody th").all_text_contents()]

    head = shown.get_by_role("button", name="last").first
    head.click()
    assert order() == ["1", "0", "3", "2"]
    head.click()
    assert order() == ["3", "0", "1", "2"]
    shown.get_by_role("button", name="run").click()
    assert order() == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_names_are_never_read_as_html_or_run(look, write_run, tmp_path):
    evil = [
        "<script>alert(1)</script>",
        "</script><script>alert(2)</script>",
        "<img src=x onerror=alert(3)>",
        '"><svg onload=alert(4)>',
        "<a href='https://evil.example'>z</a>",
        "%{x}<!--",
        "bad\ud800\x00",
    ]
    rows = []
    for i in range(20):
        rows.append({"iteration": i, **dict.fromkeys(evil, i), "t/acc": i})
        rows[-1] |= {f"seg/IoU-{name}": i for name in evil}
    folder = tmp_path / "<script>alert(5)<"
    place = write_run(folder, rows, json.dumps({"A": evil[0], "B": evil[1]}))
    other = write_run(tmp_path / "<b>", rows, json.dumps({"A": evil[2], "B": evil[3]}))
    content = {"class_names": [evil[4], "<b>x</b>"], "confusion": [[3, 1], [0, 4]]}
    (folder / "confusion_<b>.json").write_text(json.dumps(content))
    page = make_page([place, other])
    tags = [tag for tag, _ in Reader(page).tags]
    assert tags.count("script") == 3
    assert {"img", "svg", "a", "b"} & {*tags} == set()

    shown = look(page)
    shown.evaluate("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    text = shown.locator("main").inner_text()
    for name in (evil[0], evil[1], evil[2], evil[3]):
        assert name in text
    assert shown.locator("main img, main a, main b").count() == 0
    for chart in shown.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        shown.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"])
        shown.wait_for_selector(".hoverlayer text")
        hovered = chart.locator(".hoverlayer text").all_text_contents()
        if "square" in chart.get_attribute("class"):
            (line,) = hovered
            assert line.startswith((f"{evil[4]}, predicted ", "<b>x</b>, predicted "))
        else:
            assert any(line.startswith("<b>") for line in hovered)
        assert chart.locator("a").count() == 0


@pytest.mark.slow
def test_a_script_in_the_page_that_is_not_ours_does_not_run(browser, page, tmp_path):
    file = tmp_path / "page.html"
    worse = "<script>window.isBroken = true</script><img src='https://evil.example/a.png'>"
    file.write_text(page.replace("</main>", f"{worse}</main>"))
    shown = browser.new_page()
    problems = []
    shown.on("console", lambda message: problems.append(message.text))
    shown.goto(file.as_uri())
    shown.wait_for_function("[...document.querySelectorAll('.chart')].every((c) => c.data)")
    assert shown.evaluate("window.isBroken") is None
    assert len([text for text in problems if "Content Security Policy" in text]) == 2
    shown.close()
