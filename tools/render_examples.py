#!/usr/bin/env python
"""Train short runs of digits, in about a minute, and draw the pictures in docs/images from them.

::

    python tools/render_examples.py

needs matplotlib (``pip install 'trainkit[plot]'``) and, for the page, Chromium.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import plot_metrics
from PIL import Image
from plots.browser import find_chromium, run_chromium

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"

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
_PAGE_SIZE = (1280, 1030)


def main(images: Path = IMAGES) -> None:
    """Write curves.png, and page.png if there is a browser."""
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        runs = [train(Path(scratch) / name, settings) for name, settings in _RUNS.items()]
        page = Path(scratch) / "page.html"
        args = [*map(str, runs), "--output", str(images / "curves.png"), "--html", str(page)]
        plot_metrics.main(plot_metrics.parse_args(args))
        _shrink(images / "curves.png")
        if find_chromium() is None:
            print("page.png is not rendered: there is no chromium", file=sys.stderr)
            return
        size = ",".join(map(str, _PAGE_SIZE))
        run_chromium(page, f"--screenshot={images / 'page.png'}", f"--window-size={size}")
        _shrink(images / "page.png")


def _shrink(path: Path) -> None:
    """Keep 200 colours, so that a reader of the page loads a third of the bytes."""
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(200, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def train(folder: Path, settings: list[str]) -> Path:
    """Train a run of the default job in ``folder``."""
    command = [
        sys.executable,
        str(ROOT / "tools/train_net.py"),
        "OUTPUT_DIR",
        str(folder),
        *_COMMON,
        *settings,
    ]
    print(f"training {folder.name}", file=sys.stderr)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # the model is too small for two threads
    subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, check=True)
    return folder


if __name__ == "__main__":
    argparse.ArgumentParser(description="Render the pictures in docs/images again.").parse_args()
    main()
