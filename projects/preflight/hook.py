"""The hook that checks the job before its first step."""

import json as json_module
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from trainkit.projects.preflight import checks
from trainkit.projects.preflight.findings import PREFLIGHT_REGISTRY, report
from trainkit.projects.preflight.job import Job

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HOOK_REGISTRY, HookBase
from trainkit.utils import comm


@HOOK_REGISTRY.register()
class Preflight(HookBase):
    """Checks the job and ends the process, with code 0 if it is sound, else with code 3.

    Args:
        given: the settings of the job, as YAML.
        quick: leave out the checks that need new processes.
        allow: names of findings to accept; ``json``: a file for the findings.
    """

    def __init__(self, given: str, quick: bool = False, allow: Sequence[str] = (), json: str = "") -> None:
        self._given, self._is_quick, self._allow, self._json = given, quick, allow, json

    def before_train(self) -> None:
        questions = dict(PREFLIGHT_REGISTRY)
        if unknown := {*self._allow} - questions.keys():
            raise ConfigError(
                f"--preflight-allow: there is no check {', '.join(sorted(unknown))}; there are {[*questions]}"
            )
        job, found = Job(self.trainer, self._given), []
        for name, question in questions.items():
            if sys.stderr.isatty():
                print(f"\r{name:<20}", end="", file=sys.stderr, flush=True)
            if not (self._is_quick and name in checks.WITH_PROCESSES):
                found.append(job.ask(name, question))
        shutil.rmtree(job.folder, ignore_errors=True)
        if comm.is_main_process():
            print(report(found, self._allow), flush=True)
            if self._json:
                Path(self._json).write_text(json_module.dumps([finding._asdict() for finding in found], indent=2))
        logging.disable()  # the end of this process is no failure of a run
        sys.exit(0 if all(finding.is_sound or finding.name in self._allow for finding in found) else 3)
