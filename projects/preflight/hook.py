"""The hook that checks the job before its first step."""

import json
import logging
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.projects.preflight import checks
from trainkit.projects.preflight.findings import PREFLIGHT_REGISTRY, Finding
from trainkit.projects.preflight.job import Job

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils import comm
from trainkit.utils.logger import format_table

# the checks that --preflight-quick leaves out
_IN_NEW_PROCESSES = ("reproducible", "processes")


@HOOK_REGISTRY.register()
class Preflight(HookBase):
    """Checks the job (``given``: the user's settings) and ends the process: with code 0 if it is sound, else with 3."""

    def __init__(self, given: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        self._given = given
        self._args = args

    def before_train(self) -> None:
        logging.disable()  # the end of this process is no failure of a run
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a run would stop after its step
        signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
        found = comm.broadcast(self._ask())
        allowed = {*self._args["preflight_allow"]}
        bad = []
        for finding in found:
            is_fine = finding.verdict in ("sound", "not asked")
            if not is_fine and finding.name not in allowed:
                bad.append(finding.name)
        if comm.is_main_process():
            self._report(found, allowed, bad)
        names = [finding.name for finding in found]
        unknown = allowed.difference(names)
        if unknown and not bad:
            raise ConfigError(
                f"--preflight-allow: no finding is called {', '.join(unknown)}; there are {names}"
            )
        sys.exit(3 if bad else 0)

    def _ask(self) -> list[Finding]:
        """The findings of all checks; those of others come after those of this project."""
        job = Job(self.trainer, self._given, self._args["preflight_command"])
        entries = sorted(PREFLIGHT_REGISTRY, key=lambda entry: _is_of_others(entry[1]))
        found: list[Finding] = []
        for number, (name, check) in enumerate(entries, 1):
            if sys.stderr.isatty():
                print(f"{number}/{len(entries)} {name:<20}", end="\r", file=sys.stderr, flush=True)
            is_left_out = self._args["preflight_quick"] and name in _IN_NEW_PROCESSES
            if not is_left_out:
                found += job.ask(check)
            if found[0].verdict != "sound":  # the job does not run
                break
        return found

    def _report(self, found: list[Finding], allowed: set[str], bad: list[str]) -> None:
        rows = []
        for name, verdict, text, advice in found:
            if name in allowed:
                verdict += " (allowed)"
            rows.append((name, verdict, f"{text}: {advice}" if advice else text))
        headers = ("question", "answer", "what was found")
        print(format_table(rows, headers, maxcolwidths=[None, None, 84]))
        if bad:
            accept = f"To accept one: --preflight-allow {bad[0]}"
            print(f"\nFindings: {', '.join(bad)}. {accept}", flush=True)
        else:
            not_asked = [finding.name for finding in found if finding.verdict == "not asked"]
            rest = f" Not asked: {', '.join(not_asked)}." if not_asked else ""
            print(f"\nThe job is sound.{rest}", flush=True)
        file = self._args["preflight_json"]
        if file:
            rows_of_file = [finding._asdict() for finding in found]
            Path(file).write_text(json.dumps(rows_of_file, indent=2), encoding="utf-8")


def _is_of_others(check: Any) -> bool:
    return check.__module__ != checks.__name__
