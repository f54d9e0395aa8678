#!/usr/bin/env python
"""Write the reference of all config keys from the comments where trainkit and its projects declare them.

::

    python tools/config_reference.py > docs/config.md
"""

import argparse
import inspect
import itertools
import re
from collections.abc import Iterator
from functools import reduce
from typing import Any

from tabulate import tabulate

from trainkit.config import CfgNode, defaults, get_cfg
from trainkit.config.lengths import LENGTH_KEYS
from trainkit.utils.plugins import CONFIG_KEYS, load_plugin

INTRODUCTION = """\
# Config reference

This page lists every key with its default. `tools/config_reference.py` writes it from `trainkit/config/defaults.py` and
the projects. A config is a YAML file with some of these keys. Options after a command override it:

```sh
python tools/train_net.py --config-file projects/digits/config.yaml SOLVER.BASE_LR 0.05 SOLVER.MAX_ITER 20ep
```

- Keys marked with * take iterations (`500`) or epochs (`3ep`, `0.5ep`).
- `_BASE_: other.yaml` loads another file first. A node with `_DELETE_: True` replaces the node of that file.
- A key that does not exist, or a value of the wrong type, is an error that says what is accepted, and so is a number
  out of its range. `MODEL`, `INPUT` and `SOLVER.OPTIMIZER` accept keys of your own too; you get a warning for a key
  there that looks like one of trainkit's keys.
"""

_SECTION = r"# -{5,} (?P<section>.+)"
_KEY = r"(?:_C|cfg)\.(?P<key>[A-Z]\S+) = .+?(?:  # (?P<text>.+))?"
_LINE = re.compile(rf"^ *(?:{_SECTION}|{_KEY})$", re.MULTILINE)


def describe_keys() -> Iterator[tuple[str, str, Any, str]]:
    """Section, key, default (a node if it holds other keys) and comment of each key, in the order of the files."""
    cfg, section = get_cfg(), "general"
    found: dict[str, tuple[str, str]] = {}
    modules = [defaults, *(load_plugin(module) for module in dict.fromkeys(CONFIG_KEYS.values()))]
    for module in modules:
        for line in _LINE.finditer(inspect.getsource(module)):
            section = line["section"] or section
            if line["key"] and (line["text"] or line["key"] not in found):  # a project may also set keys of others
                found[line["key"]] = section, line["text"] or ""
        section = "projects"
    for key, (section, text) in found.items():
        yield section, key, reduce(getattr, key.split("."), cfg), text


def main() -> None:
    """Print the whole page."""
    print(INTRODUCTION, end="")
    for section, entries in itertools.groupby(describe_keys(), key=lambda entry: entry[0]):
        rows = [
            (f"**{key}**" if isinstance(default, CfgNode) else f"`{key}`", _show(key, default), _escape(text))
            for _, key, default, text in entries
            if text
        ]
        print(f"\n## {section.capitalize()}\n")
        print(tabulate(rows, ["key", "default", "what it does"], tablefmt="pipe"))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, which has only ``--help``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    return parser.parse_args(arguments)


def _show(key: str, default: Any) -> str:
    if isinstance(default, CfgNode):
        return ""
    return f"`{default!r}`" + " \\*" * (key in LENGTH_KEYS)


def _escape(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("|", "\\|")


if __name__ == "__main__":
    parse_args()
    main()
