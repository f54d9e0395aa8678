#!/usr/bin/env python
"""Repeat a step of a past run: ``python -m trainkit.projects.replay``, see docs/replay.md."""

import sys

from trainkit.projects.replay.__main__ import main, parse_args

if __name__ == "__main__":
    sys.exit(main(parse_args()))
