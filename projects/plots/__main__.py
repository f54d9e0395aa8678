"""Draw the metrics of one or several runs side by side, in a picture or on a page for a browser.

::

    python -m trainkit.projects.plots output/digits output/other -o metrics.png
    python -m trainkit.projects.plots output/digits output/other -o metrics.html

Name a run by its output folder, or by a JSON file of metrics. If arguments are wrong or a run cannot be shown, the tool
ends with one line and exit code 2.
"""

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.projects.plots.panels import choose_panels
from trainkit.projects.plots.runs import RunError, read_runs, readable

_PAGES = (".html", ".htm")
_EXTRAS = ("matplotlib", "plotly")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="plots",
        description="Show the metrics of runs side by side.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="an output folder, or a metrics.json"
    )
    parser.add_argument(
        "-o",
        "--output",
        "--html",
        type=Path,
        action="append",
        metavar="FILE",
        help="a page (.html) or a picture (.png, .svg, .pdf), also several times;"
        " default: metrics.png in the folder of the first run",
    )
    return parser.parse_args(args)


def main(args: argparse.Namespace) -> list[Path]:
    """
    Returns:
        The files written.

    Raises:
        RunError: the files cannot be written.
    """
    outputs = args.output or [None]
    for path in outputs:
        drawing_module(path)  # now, before anything is read
    runs = read_runs(args.runs)
    panels = choose_panels(runs)
    written = []
    for path in outputs:
        module = drawing_module(path)
        if path is not None and path.suffix.lower() in _PAGES:
            module.write_page(path, runs, panels)
            written.append(path)
        else:
            written.append(path or runs[0].folder / "metrics.png")
            module.save_picture(written[-1], runs, panels)
    return written


def drawing_module(path: Path | None) -> Any:
    """The module that writes such a file; each needs another optional package."""
    is_page = path is not None and path.suffix.lower() in _PAGES
    name = "page" if is_page else "picture"
    try:
        return importlib.import_module(f"trainkit.projects.plots.{name}")
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise RunError(
            f"a {name} needs the package {package}: pip install 'trainkit[plot]'"
        ) from error


def invoke_main() -> None:
    """Run with the options of the command line."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        for path in main(parse_args()):
            print(f"{readable(str(path))} ({path.stat().st_size / 1e6:.1f} MB)")
    except RunError as error:
        print(f"error: {readable(str(error))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    invoke_main()
