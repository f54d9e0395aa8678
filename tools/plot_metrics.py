#!/usr/bin/env python
"""Draw the metrics of one or several runs side by side, in a picture or on a page for a browser.

::

    python tools/plot_metrics.py output/digits output/other --output metrics.png
    python tools/plot_metrics.py output/digits output/other --html metrics.html

Name a run by its output folder, or by a JSON file of metrics. If arguments are wrong or a run cannot be shown, the tool
ends with one line and exit code 2.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from plots.page import write_page
from plots.panels import choose_panels
from plots.picture import check_matplotlib, save_picture
from plots.runs import RunError, read_runs


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="plot_metrics.py",
        description="Show the metrics of runs side by side.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="an output folder, or a metrics.json"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PICTURE",
        help="a .png, .svg or .pdf; default: metrics.png in the folder of the first run; none with --html",
    )
    parser.add_argument(
        "--html", type=Path, metavar="PAGE", help="one file that a browser shows without a network"
    )
    return parser.parse_args(args)


def main(args: argparse.Namespace) -> list[Path]:
    """
    Returns:
        The files written.

    Raises:
        RunError: the files cannot be written.
    """
    if args.output or not args.html:
        check_matplotlib()  # now, before anything is read
    runs = read_runs(args.runs)
    panels = choose_panels(runs)
    written = []
    if args.output or not args.html:
        written.append(args.output or runs[0].folder / "metrics.png")
        save_picture(written[-1], runs, panels)
    if args.html:
        written.append(args.html)
        write_page(args.html, runs, panels)
    return written


def invoke_main() -> None:
    """Run with the options of the command line."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        for path in main(parse_args()):
            print(path)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    invoke_main()
