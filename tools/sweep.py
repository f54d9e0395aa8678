#!/usr/bin/env python
"""Train a job with different settings, several runs at a time, and compare the results in a table.

::

    python tools/sweep.py output/sweep SOLVER.BASE_LR=0.03,0.1,0.3 MODEL.WIDTH=8,16          # a grid: six runs
    python tools/sweep.py output/sweep --random 12 SOLVER.BASE_LR=log:1e-3..1 MODEL.WIDTH=8,16
    python tools/sweep.py output/sweep SEED=0,1,2 -- --config-file job.yaml SOLVER.MAX_ITER 400

Each run is an ordinary run of ``tools/train_net.py`` (or ``--script``) with ``--resume``, in a folder of its own. The
arguments after ``--`` go to each run. The same command again continues the sweep: finished runs are not repeated,
others continue from their checkpoints. The same command with more values, or a larger ``--random``, adds runs.

The exit code is 0; 1 if a run has failed, 2 for a mistake in the command, 130 or 143 if a signal has ended the sweep.
"""

import argparse
import contextlib
import csv
import hashlib
import itertools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from tabulate import tabulate
from train_net import DEFAULT_CONFIG
from trainkit.projects.finders.command import positive
from trainkit.projects.plots.runs import Run, RunError, read_runs

from trainkit.checkpoint.atomic import write_text
from trainkit.config import ConfigError, get_cfg
from trainkit.engine import default_argument_parser, user_errors_exit
from trainkit.utils.direction import infer_mode
from trainkit.utils.run_folder import is_owned_by_another, own_folder, release_folder

Settings: TypeAlias = dict[str, str]  # key of the config -> value, as on the command line

TRAIN_NET = Path(__file__).with_name("train_net.py")
_STATE_FILE = "sweep.json"
_RANGE = re.compile(r"(?P<log>log:)?(?P<low>[-+\d.e]+?)\.\.(?P<high>[-+\d.e]+)")
_POLL_SEC = 0.1
_MAX_NAME = 80  # characters of a folder's name
_MAX_REPEATS = 1000  # so many draws in a row may give runs that exist already


# ---------------------------------------------------------------------------- which runs


def parse_spec(spec: str) -> tuple[str, str]:
    """Key and values of ``KEY=VALUES``.

    Raises:
        ConfigError: the text has another form.
    """
    key, equals, values = spec.partition("=")
    if not (key and equals and values):
        raise ConfigError(
            f"{spec!r} is no KEY=VALUES; write SOLVER.BASE_LR=0.01,0.1 or SOLVER.BASE_LR=log:1e-3..1"
        )
    if key in ("OUTPUT_DIR", "CHECKPOINT.DIR"):
        raise ConfigError(
            f"{key} cannot be varied: the sweep gives each run a folder of its own; leave it out"
        )
    return key, values


def split_values(values: str) -> list[str]:
    """``"8,16"``, or with another separator for values that have commas: ``"(1,2);(3,4)"``."""
    return [value.strip() for value in values.split(";" if ";" in values else ",")]


def make_grid(specs: dict[str, str]) -> list[Settings]:
    """Every combination of the values; the last key varies fastest.

    Raises:
        ConfigError: a key has a range; a grid needs values.
    """
    for key, values in specs.items():
        if _RANGE.fullmatch(values):
            raise ConfigError(
                f"{key}={values} is a range, which has no grid; list the values, or give --random N"
            )
    return [
        dict(zip(specs, values, strict=True))
        for values in itertools.product(*map(split_values, specs.values()))
    ]


def draw(specs: dict[str, str], number: int, seed: int) -> list[Settings]:
    """``number`` different settings; a larger number gives the same first settings as a smaller one.

    Raises:
        ConfigError: a range is wrong, or fewer different settings are possible.
    """
    generator = random.Random(seed)
    drawn: list[Settings] = []
    repeats = 0
    while len(drawn) < number:
        settings = {key: _draw_value(generator, key, values) for key, values in specs.items()}
        repeats = repeats + 1 if settings in drawn else 0
        if repeats > _MAX_REPEATS:
            raise ConfigError(
                f"--random is {number}, but only {len(drawn)} settings are different; ask for fewer"
            )
        if not repeats:
            drawn.append(settings)
    return drawn


def _draw_value(generator: random.Random, key: str, values: str) -> str:
    found = _RANGE.fullmatch(values)
    if not found:
        return generator.choice(split_values(values))
    try:
        low, high = float(found["low"]), float(found["high"])
    except ValueError:
        low, high = 0.0, -1.0
    if low > high or (found["log"] and low <= 0):
        raise ConfigError(
            f"{key}={values}: write LOW..HIGH with LOW <= HIGH, or log:LOW..HIGH with 0 < LOW <= HIGH"
        )
    if found["log"]:
        return f"{low * (high / low) ** generator.random():.4g}"
    if all(re.fullmatch(r"[-+]?\d+", found[end]) for end in ("low", "high")):
        return str(generator.randint(int(low), int(high)))
    return f"{generator.uniform(low, high):.4g}"


def check_settings(script_args: Sequence[str], runs: Sequence[Settings]) -> None:
    """Check the settings of each run of ``train_net.py`` before the first one starts.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type.
    """
    given = default_argument_parser().parse_args(list(script_args))
    if getattr(given, "fork", ""):  # the config is that of another run
        return
    cfg = get_cfg()
    cfg.merge_from_file(given.config_file or str(DEFAULT_CONFIG))
    cfg.merge_from_list(given.opts)
    for settings in runs:
        cfg.clone().merge_from_list([word for pair in settings.items() for word in pair])


def name_run(settings: Settings) -> str:
    """A name for a run's folder, made of its settings; equal settings have equal names in every sweep."""
    text = ",".join(f"{key}={value}" for key, value in settings.items())
    name = re.sub(r"[^\w.,=+-]", "_", text)
    if name == text and len(name) <= _MAX_NAME:
        return name
    return f"{name[:_MAX_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


# ---------------------------------------------------------------------------- running them


class Sweep:
    """The runs of a folder. ``sweep.json`` there holds the arguments, and the exit code of each run that has ended.

    Raises:
        ConfigError: the folder belongs to another sweep, or to a sweep that is running.
    """

    def __init__(
        self, folder: Path, script: str, script_args: Sequence[str], runs: Sequence[Settings]
    ) -> None:
        self.folder, self.runs = folder, {name_run(settings): settings for settings in runs}
        self._command = [sys.executable, script, "--resume", *script_args]
        self._file = folder / _STATE_FILE
        self.signal: int | None = None  # the signal that has ended the sweep
        try:
            own_folder(folder)
        except OSError as error:
            raise ConfigError(f"the folder {str(folder)!r} cannot be used: {error}") from error
        arguments = [str(Path(script).resolve()), *script_args]
        state: dict[str, Any] = {"arguments": arguments, "exit": {}}
        if self._file.exists():
            state = json.loads(self._file.read_text())
        if state["arguments"] != arguments:
            raise ConfigError(
                f"{str(folder)!r} has the sweep of another command: {shlex.join(state['arguments'])}; this one is "
                f"{shlex.join(arguments)}. Choose another folder"
            )
        self._state = state
        self.codes: dict[str, int] = state["exit"]

    def command(self, name: str) -> list[str]:
        """The command of one run."""
        settings = [word for pair in self.runs[name].items() for word in pair]
        return [*self._command, "OUTPUT_DIR", str(self.folder / name), *settings]

    def run(self, processes: int, devices: Sequence[str]) -> None:
        """Train what has not finished yet, ``processes`` runs at a time."""
        waiting = [name for name in self.runs if self.codes.get(name) != 0]
        print(
            f"{len(self.runs)} runs, {len(self.runs) - len(waiting)} of them finished", flush=True
        )
        places = list(devices or [""]) * processes  # for each place, the device that its run sees
        running: dict[str, _Child] = {}
        while running or (waiting and self.signal is None):
            for name in [name for name in waiting if not is_owned_by_another(self.folder / name)]:
                if self.signal is None and len(running) < processes:
                    waiting.remove(name)
                    running[name] = self._start(name, processes, places.pop(0))
            # after the kill of a sweep, its runs continue without it; wait for them
            time.sleep(_POLL_SEC)
            for name, child in [*running.items()]:
                if self.signal is not None and not child.is_told:
                    child.process.send_signal(signal.SIGTERM)  # the run saves a checkpoint and ends
                    child.is_told = True
                if (code := child.process.poll()) is not None:
                    places.insert(0, running.pop(name).device)
                    self._note(name, code, time.monotonic() - child.start)

    def stop(self, signal_number: int, frame: FrameType | None = None) -> None:
        """A signal handler: the runs save a checkpoint and end, and no other run is started."""
        self.signal = signal_number

    def _start(self, name: str, processes: int, device: str) -> "_Child":
        environment = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
            **os.environ,
        }
        if device:
            environment["CUDA_VISIBLE_DEVICES"] = device
        with (self.folder / f"{name}.txt").open("ab") as output:
            # in a session of its own: Ctrl-C reaches only the sweep, which then stops its runs
            streams: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": output,
                "stderr": output,
            }
            process = subprocess.Popen(
                self.command(name), env=environment, start_new_session=True, **streams
            )
        return _Child(process, device, time.monotonic())

    def _note(self, name: str, code: int, duration_sec: float) -> None:
        if self.signal is None or code == 0:
            self.codes[name] = code
            write_text(json.dumps(self._state, indent=1), self._file)
        state = "finished" if code == 0 else f"ended with exit code {code}"
        print(f"{name}: {state} after {duration_sec:.0f} s", flush=True)


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    device: str
    start: float
    is_told: bool = False  # whether the run was told that the sweep has ended


# ---------------------------------------------------------------------------- the table


def choose_metric(metric: str, mode: str, runs: dict[str, Run]) -> tuple[str, str]:
    """The metric of the table (default: CHECKPOINT.BEST_METRIC), and whether "max" or "min" is better.

    Raises:
        ConfigError: the mode cannot be told from the name.
    """
    for run in runs.values():
        best = (run.config or {}).get("CHECKPOINT.BEST_METRIC")
        metric = metric or (best[0] if isinstance(best, list) and best else best) or "total_loss"
    metric = metric or "total_loss"
    if mode != "auto":
        return metric, mode
    by_name = infer_mode(metric)
    if by_name is None:
        raise ConfigError(
            f"the name {metric!r} does not tell whether more or less is better; give --mode"
        )
    return metric, by_name


def make_table(sweep: Sweep, metric: str, mode: str) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows, the best run first, by its best value on the validation data."""
    found: dict[str, Run] = {}
    for name in sweep.runs:
        with contextlib.suppress(RunError):  # the run has no results yet
            [found[name]] = read_runs([str(sweep.folder / name)])
    metric, mode = choose_metric(metric, mode, found)
    sign = -1 if mode == "max" else 1
    keys = list(dict.fromkeys(key for settings in sweep.runs.values() for key in settings))
    rows = []
    for name, settings in sweep.runs.items():
        series = found[name].series if name in found else {}
        values = series.get(metric)
        best = values.best(mode) if values else None
        at_end = series.get(f"test/{metric}") or values
        code = sweep.codes.get(name)
        state = "finished" if code == 0 else "not finished" if code is None else f"failed ({code})"
        done, value = best or (None, None)
        last = at_end.last if at_end else None
        rows.append([*(settings.get(key, "") for key in keys), value, done, last, state])
    rows.sort(key=lambda row: (row[-4] is None, sign * (row[-4] or 0)))
    return [*keys, f"best {metric}", "after iterations", "at the end", "state"], rows


# ---------------------------------------------------------------------------- the command


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ``script_args`` has the arguments after ``--``."""
    words = list(sys.argv[1:] if args is None else args)
    place = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="where the runs are, each in a folder of its own")
    parser.add_argument(
        "specs", nargs="+", metavar="KEY=VALUES", help="VALUES: 1,2,3 or 0.1..1 or log:1e-4..1"
    )
    parser.add_argument(
        "--random",
        type=positive,
        metavar="N",
        help="draw N settings instead of taking all combinations",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the settings drawn (default %(default)s)"
    )
    parser.add_argument(
        "--processes", type=positive, default=1, help="runs at the same time (default %(default)s)"
    )
    parser.add_argument(
        "--devices",
        default="",
        help="of CUDA, such as 0,1: each run sees one of them; default: each sees all",
    )
    parser.add_argument(
        "--script",
        default=str(TRAIN_NET),
        help="a training script with the options of train_net.py",
    )
    parser.add_argument(
        "--metric", default="", help="of the table (default: CHECKPOINT.BEST_METRIC, or total_loss)"
    )
    parser.add_argument(
        "--mode", choices=["auto", "max", "min"], default="auto", help="which value of it is better"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands and train nothing"
    )
    read = parser.parse_args(words[:place])
    read.script_args = words[place + 1 :]
    return read


def main(args: argparse.Namespace) -> int:
    """The exit code."""
    specs = dict(map(parse_spec, args.specs))
    if len(specs) < len(args.specs):
        raise ConfigError("a key is given twice; give all of its values at once: KEY=1,2,3")
    if not Path(args.script).is_file():
        raise ConfigError(f"--script: there is no file {args.script!r}; name a training script")
    if args.mode == "auto" and args.metric:
        choose_metric(args.metric, args.mode, {})  # its error must come before hours of training
    runs = make_grid(specs) if args.random is None else draw(specs, args.random, args.seed)
    # another script may have keys of its own
    if Path(args.script).resolve() == TRAIN_NET.resolve():
        check_settings(args.script_args, runs)
    sweep = Sweep(args.folder, args.script, args.script_args, runs)
    try:
        if args.dry_run:
            print(*(shlex.join(sweep.command(name)) for name in sweep.runs), sep="\n")
            return 0
        former = {
            number: signal.signal(number, sweep.stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            sweep.run(args.processes, [device for device in args.devices.split(",") if device])
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
    finally:
        release_folder(args.folder)
    columns, rows = make_table(sweep, args.metric, args.mode)
    with (args.folder / "sweep.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])
    print(tabulate(rows, columns, missingval="-"))
    if all(row[-4] is None for row in rows):
        print(f"No run has the metric of the column {columns[-4]!r}; --metric names another")
    if sweep.signal is not None:
        print("The same command continues the sweep")
        return 128 + sweep.signal
    if failed := [name for name in sweep.runs if sweep.codes.get(name) != 0]:
        print(
            f"{len(failed)} runs have failed; see {args.folder / failed[0]}.txt. The same command tries them again"
        )
    return int(bool(failed))


if __name__ == "__main__":
    with user_errors_exit():
        sys.exit(main(parse_args()))
