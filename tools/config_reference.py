#!/usr/bin/env python
"""Write docs/config.md, and the keys of each project into its README, from the comments where the keys are declared.

::

    python tools/config_reference.py
"""

import argparse
import inspect
import itertools
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from tabulate import tabulate

from trainkit.config import CfgNode, defaults, get_cfg
from trainkit.config.lengths import LENGTH_KEYS
from trainkit.utils.loading import load_plugin
from trainkit.utils.plugins import CONFIG_KEYS

ROOT = Path(__file__).parents[1]
INTRODUCTION = """\
# Config reference

This page lists the keys of trainkit with their defaults. `tools/config_reference.py` writes it from
`trainkit/config/defaults.py`. A config is a YAML file with some of these keys. Options after a command override it, and
`--print-config` shows the result:

```sh
python tools/train_net.py --config-file projects/digits/config.yaml SOLVER.BASE_LR 0.05 SOLVER.MAX_ITER 20ep
```

- Keys marked with * take iterations (`500`) or epochs (`3ep`, `0.5ep`). `SOLVER.CHECKPOINT_PERIOD` also takes a time
  (`30min`, `1h 30min`).
- In `trainer.cfg` a length in epochs is an int. A period that is not a whole number of iterations is a `Period`,
  also in entries of `HOOKS`: read it by `is_due(trainer, period)`.
- `_BASE_: other.yaml` loads another file first. A node with `_DELETE_: True` replaces the node of that file.
- `config.yaml` in the output folder has the settings of the last start, also of a `--resume` that was
  then refused: start it again with the right settings before you use the file. A run from this file trains the same.
- A few defaults give way where they do not fit: `WARMUP_ITERS`, `STEPS`, `MOMENTUM`, `NESTEROV` and `WEIGHT_DECAY` of
  `SOLVER`, and `DATALOADER.SAMPLER_TRAIN`. A value that you set counts as it is, also if it is the same as the default.
  `config.yaml` has these keys only if you set them; the others are comments at its end.
- A key that does not exist, or a value of the wrong type, is an error that says what is accepted, and so is a number
  out of its range. `MODEL`, `INPUT` and `SOLVER.OPTIMIZER` accept keys of your own too, so check your spelling there.
  The keys of a feature that is off accept every value of their type.
- `None` and `null` are no text: `CHECKPOINT.DIR None` means the same as `CHECKPOINT.DIR ''`.
"""

_HEADING = "## Keys\n"
# the lines of a comment, and the key that follows them
_COMMENT = r"(?P<text>(?: *# (?!-{5}).+\n)+)"
_KEY = r" *(?:_C|cfg)\.(?P<key>[A-Z]\S+) = .+"
_SECTION = r"# -{5,} (?P<section>.+)"
_ENTRY = re.compile(rf"^(?:{_SECTION}|{_COMMENT}{_KEY})$", re.MULTILINE)


def describe_keys() -> Iterator[tuple[str, str, Any, str]]:
    """Module or section, key, default (a node if it holds keys) and comment of each key, in the order of files."""
    cfg, section = get_cfg(), "general"
    for module in ["", *dict.fromkeys(CONFIG_KEYS.values())]:
        for entry in _ENTRY.finditer(
            inspect.getsource(load_plugin(module) if module else defaults)
        ):
            section = entry["section"] or section
            if entry["key"]:
                default = reduce(getattr, entry["key"].split("."), cfg)
                text = " ".join(
                    line.strip().removeprefix("# ") for line in entry["text"].splitlines()
                )
                yield module or section, entry["key"], default, text


def pages() -> Iterator[tuple[Path, str]]:
    """Each file and its text."""
    tables = {
        place: tabulate(
            [_row(*entry) for _, *entry in entries],
            ["key", "default", "what it does"],
            tablefmt="pipe",
        )
        for place, entries in itertools.groupby(describe_keys(), key=lambda entry: entry[0])
    }
    projects = {module: module.split(".")[2] for module in CONFIG_KEYS.values()}
    page = INTRODUCTION
    for section in [place for place in tables if place not in projects]:
        page += f"\n## {section.capitalize()}\n\n{tables[section]}\n"
    page += "\n## Projects\n\nThe README of a project has its keys.\n\n"
    for module, project in projects.items():
        keys = ", ".join(
            f"`{key}`" for key, declared_by in CONFIG_KEYS.items() if declared_by == module
        )
        page += f"- [{project}](../projects/{project}/README.md): {keys}\n"
        readme = ROOT / "projects" / project / "README.md"
        before, heading, after = readme.read_text().partition(_HEADING)
        following = after[after.index("\n## ") :] if "\n## " in after else ""
        yield readme, f"{before.rstrip()}\n\n{heading or _HEADING}\n{tables[module]}\n{following}"
    yield ROOT / "docs" / "config.md", page


def main() -> None:
    """Write all files."""
    for path, text in pages():
        path.write_text(text)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, which has only ``--help``."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser.parse_args(arguments)


def _row(key: str, default: Any, text: str) -> tuple[str, str, str]:
    if isinstance(default, CfgNode):
        return f"**{key}**", "", _escape(text)
    return f"`{key}`", f"`{default!r}`" + " \\*" * (key in LENGTH_KEYS), _escape(text)


def _escape(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("|", "\\|")


if __name__ == "__main__":
    parse_args()
    main()
