"""The hook that checks the job before its first step."""

import json
import logging
import os
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


@HOOK_REGISTRY.register()
class Preflight(HookBase):
    """Checks the job (``given``: the user's settings) and ends the process: with code 0 if it is sound, else with 3."""

    def __init__(self, given: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        self._given, self._args = given, args

    def before_train(self) -> None:
        logging.disable()  # the end of this process is no failure of a run
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a run would stop after its step
        signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
        job, found = (
            Job(self.trainer, self._given, self._args["preflight_command"]),
            list[Finding](),
        )
        entries = sorted(
            PREFLIGHT_REGISTRY, key=lambda entry: entry[1].__module__ != checks.__name__
        )
        for number, (name, check) in enumerate(entries, 1):
            if sys.stderr.isatty():
                print(f"{number}/{len(entries)} {name:<20}", end="\r", file=sys.stderr, flush=True)
            if not (
                self._args["preflight_quick"] and name in ("reproducible", "resumes", "processes")
            ):
                found += job.ask(check)
            if found[0].verdict != "sound":  # the job does not run
                break
        found, allowed = comm.broadcast(found), {*self._args["preflight_allow"]}
        bad = [
            each.name
            for each in found
            if each.verdict not in ("sound", "not asked") and each.name not in allowed
        ]
        if comm.is_main_process():
            rows = [
                (n, v + " (allowed)" * (n in allowed), f"{t}: {a}" if a else t)
                for n, v, t, a in found
            ]
            print(
                format_table(
                    rows, ("question", "answer", "what was found"), maxcolwidths=[None, None, 84]
                )
            )
            accept = f". To accept one: --preflight-allow {bad[0]}" if bad else ""
            print(
                f"\nFindings: {', '.join(bad)}{accept}" if bad else "\nThe job is sound.",
                flush=True,
            )
            if file := self._args["preflight_json"]:
                Path(file).write_text(
                    json.dumps([finding._asdict() for finding in found], indent=2)
                )
        names = [each.name for each in found]
        if unknown := not bad and allowed.difference(names):
            raise ConfigError(
                f"--preflight-allow: no finding is called {', '.join(unknown)}; there are {names}"
            )
        sys.exit(3 if bad else 0)


@HOOK_REGISTRY.register()
class Killed(HookBase):
    """Kills a new run in its fourth step, after its first checkpoint; a resumed run goes on."""

    def after_step(self) -> None:
        if self.trainer.iter == 3 and self.trainer.start_iter == 0:
            os.kill(os.getpid(), signal.SIGKILL)
