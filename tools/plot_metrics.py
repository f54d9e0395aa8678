#!/usr/bin/env python
"""Draw the metrics of runs: ``python -m trainkit.projects.plots``, see docs/plots.md."""

from trainkit.projects.plots.__main__ import invoke_main, main, parse_args

__all__ = ["main", "parse_args"]

if __name__ == "__main__":
    invoke_main()
