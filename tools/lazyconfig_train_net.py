#!/usr/bin/env python
"""Train or evaluate the job of a `LazyConfig`; without arguments, the digits.

If your project needs more, copy this file, and pass your own ``build_trainer`` to `run`.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from trainkit.projects.lazy.train import run

from trainkit.engine import default_argument_parser, launch

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_CONFIG = ROOT / "projects/digits/configs/digits.py"
EXAMPLES = """
Examples:
  changed options       train.max_iter=100 optimizer.lr=0.05 +model.dropout=0.1
  the saved config      --config-file output/lazy/config.yaml
  4 processes           --num-gpus 4
"""


def main(args: argparse.Namespace) -> dict[str, Any] | None:
    """One process of the run; returns the results of ``--eval-only`` on rank 0."""
    return run(args, DEFAULT_CONFIG)


def invoke_main() -> None:
    """Run with the options of the command line."""
    args = default_argument_parser(EXAMPLES).parse_args()
    # a config may import from projects, and from the current folder
    sys.path += [str(ROOT), str(Path.cwd())]
    launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, args=(args,))


if __name__ == "__main__":
    invoke_main()
