#!/usr/bin/env python
"""Write docs/config.md, and the keys of each project into its README, from the comments where the keys are declared.

::

    python tools/config_reference.py
"""

import argparse
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from tabulate import tabulate

from trainkit.config import CfgNode, defaults, get_cfg
from trainkit.config.defaults import core_defaults, keys_of
from trainkit.config.lengths import LENGTH_KEYS
from trainkit.utils.plugins import Plugin, find_plugins

ROOT = Path(__file__).parents[1]
INTRODUCTION = """\
# Config reference

A config is a YAML file with some of the keys below. All other keys have their defaults:

```yaml
OUTPUT_DIR: output/mine
MODEL: {NAME: MyModel, WIDTH: 64} # keys of your own too
SOLVER:
  MAX_ITER: 20ep # epochs; 20 is iterations
  IMS_PER_BATCH: 64
  ACCUMULATION_STEPS: 4
  OPTIMIZER: {NAME: AdamW, BETAS: [0.9, 0.98]}
  BASE_LR: 0.001
  WEIGHT_DECAY: 0.05
  WEIGHT_DECAY_BIAS: 0.0
  PARAM_GROUPS: {CUSTOM_KEYS: [{KEY: backbone, LR_FACTOR: 0.1}]} # names with "backbone"
  LR_SCHEDULER_NAME: WarmupCosineLR
  WARMUP_ITERS: 1ep
  CLIP_GRADIENTS: {ENABLED: True, CLIP_TYPE: full_model, CLIP_VALUE: 1.0}
  AMP: {ENABLED: True, PRECISION: bfloat16}
```

Settings after a command override the file. A list, or a node with several keys, is written in quotes as in YAML.
`--print-config` shows the result and ends:

```sh
python tools/train_net.py --config-file projects/digits/config.yaml SOLVER.BASE_LR 0.05 SOLVER.MAX_ITER 20ep
python tools/train_net.py --print-config SOLVER.AMP "{ENABLED: True}" DATASETS.TEST "[digits_val]"
```

- Keys marked with * take iterations (`500`) or epochs (`3ep`, `0.5ep`). `SOLVER.CHECKPOINT_PERIOD` also takes a time
  (`30min`, `1h 30min`, `90s`).
- `_BASE_: other.yaml` loads another file first. A node with `_DELETE_: True` replaces the node of that file.
- A key that does not exist, a value of the wrong type, and a number out of its range are errors that say what is
  accepted.
- `MODEL`, `INPUT` and `SOLVER.OPTIMIZER` accept keys of your own, so check your spelling there.
  Keys in other places are added [by your script](extending.md#keys-of-one-script) or by
  [a plug-in](extending.md#a-plug-in-keys-of-the-config-options-of-the-command-line).
- `DefaultTrainer` keeps a frozen copy, `trainer.cfg`.
  A YAML file of detectron2: [what differs](migrate_from_detectron2.md).
- The output folder has the settings of the run in `config.yaml`. A run from this file trains the same.
- Some keys stay as they were if a run is resumed: [what you may change](exact_resume.md#what-you-may-change).
"""
LIMITS = """
## Limits

- In `trainer.cfg` a length in epochs is an int. A period that is not a whole number of iterations is a `Period`,
  also in entries of `HOOKS`: read it by `is_due(trainer, period)`.
- A few defaults change if they do not fit the run: `WARMUP_ITERS`, `STEPS`, `MOMENTUM`, `NESTEROV` and `WEIGHT_DECAY`
  of `SOLVER`, and `DATALOADER.SAMPLER_TRAIN`. A value that you set is never changed, even if it equals the default.
  `config.yaml` has these keys only if you set them; the others are comments at its end.
- `config.yaml` has the settings of the last start. If a `--resume` was refused because of its settings, start the run
  again with the right settings before you use the file.
- `config.yaml` leaves out the keys of projects that have their defaults, so that a run can be opened where such a
  project is missing.
- The values of a feature that is off are checked for their type only.
- `None` and `null` mean no text: `CHECKPOINT.DIR None` means the same as `CHECKPOINT.DIR ''`.
- `tools/config_reference.py` writes this page from `trainkit/config/defaults.py`.
"""

_HEADING = "## Keys\n"
# the lines of a comment, and the key that follows them
_COMMENT = r"(?P<text>(?: *# (?!-{5}).+\n)+)"
_KEY = r" *(?:_C|cfg)\.(?P<key>[A-Z]\S+) = .+"
_SECTION = r"# -{5,} (?P<section>.+)"
_OF_PROJECT = re.compile(r"trainkit\.projects\.(\w+)\.plugin")
_ENTRY = re.compile(rf"^(?:{_SECTION}|{_COMMENT}{_KEY})$", re.MULTILINE)


def describe_keys() -> Iterator[tuple[str, str, Any, str]]:
    """Project or section, key, default (a node if it holds keys) and comment of each key, in the order of files."""
    section = "general"
    for entry in _ENTRY.finditer(inspect.getsource(defaults)):
        section = entry["section"] or section
        if entry["key"]:
            yield section, *_described(entry)
    for project, plugin in projects_with_keys().items():
        for entry in _ENTRY.finditer(inspect.getsource(sys.modules[plugin.module])):
            yield project, *_described(entry)


def _described(entry: re.Match[str]) -> tuple[str, Any, str]:
    default = reduce(getattr, entry["key"].split("."), get_cfg())
    lines = [line.strip().removeprefix("# ") for line in entry["text"].splitlines()]
    return entry["key"], default, " ".join(lines)


def projects_with_keys() -> dict[str, Plugin]:
    """The plug-ins of this repository that add keys, by the name of the folder."""
    found = {}
    for plugin in find_plugins().each:
        match = _OF_PROJECT.fullmatch(plugin.module)
        if match and keys_of(plugin):
            found[match[1]] = plugin
    return found


def outermost_keys(keys: CfgNode, known: CfgNode, prefix: str = "") -> Iterator[str]:
    """The full names of ``keys``, but of those below a node that ``known`` does not have only this node."""
    for name, value in keys.items():
        if name in known:
            yield from outermost_keys(value, known[name], f"{prefix}{name}.")
        else:
            yield prefix + name


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
    projects = projects_with_keys()
    page = INTRODUCTION
    for section in [place for place in tables if place not in projects]:
        page += f"\n## {section.capitalize()}\n\n{tables[section]}\n"
    page += "\n## Projects\n\nThe README of a project has its keys.\n\n"
    for project, plugin in projects.items():
        own = outermost_keys(keys_of(plugin), core_defaults())
        keys = ", ".join(f"`{key}`" for key in sorted(own))
        page += f"- [{project}](../projects/{project}/README.md): {keys}\n"
        readme = ROOT / "projects" / project / "README.md"
        before, heading, after = readme.read_text(encoding="utf-8").partition(_HEADING)
        following = after[after.index("\n## ") :] if "\n## " in after else ""
        yield readme, f"{before.rstrip()}\n\n{heading or _HEADING}\n{tables[project]}\n{following}"
    yield ROOT / "docs" / "config.md", page + LIMITS


def main() -> None:
    """Write all files."""
    for path, text in pages():
        path.write_text(text, encoding="utf-8")


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
