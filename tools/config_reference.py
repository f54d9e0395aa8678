#!/usr/bin/env python
"""Write the reference of all config keys, which is made of the comments in ``trainkit/config/defaults.py``.

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

INTRODUCTION = """\
# Config reference

Every key with its default, from `trainkit/config/defaults.py` by `tools/config_reference.py`. A config is a YAML file
with some of these keys; options after a command override it:

```sh
python tools/train_net.py --config-file projects/digits/config.yaml SOLVER.BASE_LR 0.05 SOLVER.MAX_ITER 20ep
```

- Keys marked with * take iterations (`500`) or epochs (`3ep`, `0.5ep`).
- `_BASE_: other.yaml` starts with another file; in a node, `_DELETE_: True` replaces what the base has there.
- A key that does not exist, or a value of a wrong type, is an error that names what is accepted. `MODEL`, `INPUT` and
  `SOLVER.OPTIMIZER` take keys of your own as well; one that looks like another key there draws a warning.
"""

_SECTION = r"# -{5,} (?P<section>.+)"
_KEY = r"_C\.(?P<key>\S+) = .+?(?:  # (?P<text>.+))?"
_LINE = re.compile(rf"^(?:{_SECTION}|{_KEY})$", re.MULTILINE)


def describe_keys() -> Iterator[tuple[str, str, Any, str]]:
    """Section, key, default (a node for those above other keys), and the comment, in the order of the file."""
    cfg, section = get_cfg(), "general"
    found: dict[str, tuple[str, str]] = {}
    for line in _LINE.finditer(inspect.getsource(defaults)):
        section = line["section"] or section
        if line["key"]:  # maybe once more: a first default of another type says that this is accepted too
            found[line["key"]] = section, line["text"] or ""
    for key, (section, text) in found.items():
        yield section, key, reduce(lambda node, name: node[name], key.split("."), cfg), text


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
        print(tabulate(rows, ["key", "default", ""], tablefmt="pipe"))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, which has no options of its own."""
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
