"""Train short runs of digits, in about a minute, and draw the pictures in docs/images from them.

::

    python -m trainkit.projects.plots.examples

in the top folder of a checkout. The picture of the page needs Chromium.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from trainkit.projects.plots.__main__ import drawing_module
from trainkit.projects.plots.browser import find_chromium, take_screenshot
from trainkit.projects.plots.panels import choose_panels
from trainkit.projects.plots.runs import read_runs

IMAGES = Path("docs/images")

_COMMON = ["SOLVER.MAX_ITER", "400", "TEST.EVAL_PERIOD", "40", "LOG.PERIOD", "10"]
_COMMON += ["HOOKS", "[{NAME: Throughput}]"]  # so that the pictures show a scalar of a hook too
_RUNS = {
    "sgd": [],
    "sgd_small_lr": ["SOLVER.BASE_LR", "0.02"],
    "adamw": [
        "SOLVER.OPTIMIZER.NAME",
        "AdamW",
        "SOLVER.BASE_LR",
        "0.005",
        "SOLVER.NESTEROV",
        "False",
    ],
}
_PAGE_SIZE = (1280, 1310)


def main() -> None:
    """Write curves.png, and page.png if there is a browser."""
    write_page = drawing_module(Path("page.html")).write_page
    save_picture = drawing_module(Path("curves.png")).save_picture
    with tempfile.TemporaryDirectory() as scratch:
        folders = [train(Path(scratch) / name, settings) for name, settings in _RUNS.items()]
        runs = read_runs([str(folder) for folder in folders])
        panels = choose_panels(runs)
        save_picture(IMAGES / "curves.png", runs, panels)
        _shrink(IMAGES / "curves.png")
        if find_chromium() is None:
            print("page.png is not made: there is no chromium", file=sys.stderr)
            return
        page = Path(scratch) / "page.html"
        write_page(page, runs, panels)
        take_screenshot(page, IMAGES / "page.png", *_PAGE_SIZE)
        _shrink(IMAGES / "page.png")


def train(folder: Path, settings: list[str]) -> Path:
    """Train a run of the default job in ``folder``."""
    print(f"training {folder.name}", file=sys.stderr)
    script = "tools/train_net.py"
    command = [sys.executable, script, "OUTPUT_DIR", str(folder), *_COMMON, *settings]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # the model is too small for two threads
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
    return folder


def _shrink(path: Path) -> None:
    """Keep 200 colours, so that a reader of the page loads a third of the bytes."""
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(200, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


if __name__ == "__main__":
    main()
