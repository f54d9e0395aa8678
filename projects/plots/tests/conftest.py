"""Runs to draw, and a browser."""

import json

import numpy as np
import pytest
from PIL import Image
from trainkit.projects.plots.browser import find_chromium
from trainkit.projects.plots.runs import read_runs


@pytest.fixture(scope="session")
def write_run():
    def write_run(folder, rows, config=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if config is not None:
            (folder / "config.yaml").write_text(config)
        return str(folder)

    return write_run


@pytest.fixture(scope="session")
def read(write_run, tmp_path_factory):
    """The runs a, b, ... of the given rows."""

    def read(*rows_of_runs):
        root = tmp_path_factory.mktemp("runs")
        places = [write_run(root / chr(ord("a") + i), rows) for i, rows in enumerate(rows_of_runs)]
        return read_runs(places)

    return read


@pytest.fixture(scope="session")
def three_runs(write_run, tmp_path_factory):
    """Folders with all that a run can have: long names, nulls, many metrics, pictures, a confusion matrix."""
    root = tmp_path_factory.mktemp("runs")
    return [
        _full_run(write_run, root / "seed 0 <b>", 0.1, "both"),
        _full_run(
            write_run, root / "a_name_that_is_much_longer_than_the_others_and_goes_on", 0.02, "raw"
        ),
        write_run(
            root / "short",
            [{"iteration": 19, "total_loss": None, "lr": 1e-4}, {"iteration": 39, "lr": 2e-4}],
        ),
    ]


def _full_run(write_run, folder, lr, evaluate):
    rows = []
    for iter in range(19, 12_000, 20):
        loss = 2.5 * 0.9995**iter + 0.01
        row = {
            "iteration": iter,
            "total_loss": loss,
            "loss_box_regression": 0.4 * loss,
            "loss_mask": 0.6 * loss,
        }
        if 3_000 < iter < 3_500:
            row["total_loss"] = None
        row["lr"] = lr * (1 - iter / 12_000)
        row["grad_norm"] = 3 + iter % 7
        rows.append({**row, "time": 0.02, "data_time": 0.0001})
        if iter % 2000 == 1999:
            rows.append({"iteration": iter, "epoch": iter // 100, **_results(iter, "")})
    rows.append({"iteration": 12_000, **_results(12_000, ""), **_results(11_000, "test/")})
    run = write_run(
        folder,
        rows,
        f"SOLVER: {{BASE_LR: {lr}, MAX_ITER: 12000}}\nHOOKS: [{{EVALUATE: {evaluate}}}]\n",
    )
    for iter in (99, 11_999):
        picture = folder / "visualization" / "val" / f"digits_iter{iter:07d}_batch0003.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 30, 3), 120, np.uint8)).save(picture)
    content = {"class_names": ["cat", "<dog>"], "iteration": 12_000, "confusion": [[3, 1], [0, 4]]}
    (folder / "confusion_val.json").write_text(json.dumps(content))
    return run


def _results(iter, prefix):
    accuracy = 100 * iter / (iter + 1_000)
    metrics = {"mIoU": 0.8 * accuracy, "mAcc": 0.9 * accuracy, "seconds_per_batch": 0.02}
    metrics |= {f"IoU-class {i}": accuracy - i for i in range(5)}
    values = {
        "sem_seg": metrics,
        "classification": {"top1": accuracy, "mean_class_accuracy": accuracy},
    }
    values["raw/classification"] = {"top1": accuracy - 1}
    return {
        f"{prefix}{task}/{name}": value
        for task, row in values.items()
        for name, value in row.items()
    }


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium without a network; while it runs, other tests could run no asyncio."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    program = find_chromium()
    if program is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as started:
        options = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND"]
        yield started.chromium.launch(executable_path=program, args=options)


@pytest.fixture
def look(browser, tmp_path):
    """Show a page; at the end nothing may have failed or been loaded."""
    opened = []

    def look(html, width=1280, dark=False, touch=False):
        file = tmp_path / f"page{len(opened)}.html"
        file.write_text(html, encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            has_touch=touch,
        )
        page = context.new_page()
        problems = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: problems.append(request.url[:100]))
        page.goto(file.as_uri())
        page.wait_for_function("[...document.querySelectorAll('.chart')].every((c) => c.data)")
        opened.append((file, context, problems))
        return page

    yield look
    for file, context, problems in opened:
        context.close()
        assert [text for text in problems if text != file.as_uri()] == []
