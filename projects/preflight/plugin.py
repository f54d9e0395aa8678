"""What this project brings to trainkit."""

import argparse
import shlex
import sys
from typing import Any

ORDER = 1  # the job to check is that of all other options
NAMES = {"Preflight": "trainkit.projects.preflight.hook"}
OPTIONS = ["--preflight", "--preflight-allow", "--preflight-json", "--preflight-quick"]


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "check the job instead of training it; exit code 0: sound, 3: findings"
    # the command of the first process, before `launch` starts others; as one text, in which "3ep" stays a word
    command = shlex.join(sys.orig_argv)
    parser.add_argument(
        "--preflight", action="store_const", const=command, default=False, help=text
    )
    text = "the same, without new processes"
    parser.add_argument(
        "--preflight-quick", action="store_const", const=command, default=False, help=text
    )
    parser.add_argument(
        "--preflight-allow", action="append", default=[], metavar="NAME", help="accept this finding"
    )
    parser.add_argument(
        "--preflight-json", default="", metavar="FILE", help="write the findings to FILE too"
    )


def apply_options(cfg: Any, args: argparse.Namespace) -> None:
    from trainkit.projects.preflight.options import apply

    apply(cfg, args)
