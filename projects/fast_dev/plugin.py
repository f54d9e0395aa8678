"""What this project brings to trainkit."""

import argparse
from typing import Any

NAMES = {
    "LoadsAgain": "trainkit.projects.fast_dev.options",
    "fast_dev_config": "trainkit.projects.fast_dev.options",
}
LENDS = {"trainkit.engine": ["fast_dev_config"]}
OPTIONS = ["--fast-dev-run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "a few iterations, an evaluation, a save and a load, to find errors"
    parser.add_argument("--fast-dev-run", action="store_true", help=text)


def apply_options(cfg: Any, args: argparse.Namespace) -> None:
    from trainkit.projects.fast_dev.options import apply

    apply(cfg)
