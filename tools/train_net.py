#!/usr/bin/env python
"""Train or evaluate the job of a config; without arguments, the digits.

If your project needs more, copy this file and add methods to its ``Trainer``.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from trainkit.engine import DefaultTrainer, default_argument_parser, launch, run

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_CONFIG = ROOT / "projects/digits/config.yaml"


class Trainer(DefaultTrainer):
    """Add your own ``build_*`` methods here."""


def main(args: argparse.Namespace) -> dict[str, Any]:
    """One process of the run; returns the results of the last evaluation on rank 0."""
    if not getattr(args, "fork", ""):  # an option of a project
        args.config_file = args.config_file or str(DEFAULT_CONFIG)
    return run(args, Trainer)


def invoke_main() -> None:
    """Run with the options of the command line."""
    args = default_argument_parser().parse_args()
    # so that IMPORTS can name projects, and modules in the current folder
    sys.path += [str(ROOT), str(Path.cwd())]
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))


if __name__ == "__main__":
    invoke_main()
