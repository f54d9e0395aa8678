"""The hook of every run: its checkpoints say how it was started, and a failed step leaves a capsule."""

import logging
from functools import cached_property
from typing import Any

from trainkit.projects.replay.capsule import leave_capsule
from trainkit.projects.replay.fork import adapt
from trainkit.projects.replay.origin import active_replay, describe_origin
from trainkit.projects.replay.settings import other_settings, settings_of, table_of

from trainkit.config import ConfigError
from trainkit.engine.hook_base import HookBase
from trainkit.utils import comm
from trainkit.utils.device import device_of

logger = logging.getLogger(__name__)


class RunRecord(HookBase):
    """Puts the origin of a run, see `describe_origin`, into its checkpoints; warns if a resumed run has other settings.

    If the run is a fork, it gets the adapted state of its parent, and its origin names its parents.
    """

    priority = 101  # last: its line about a failure is the last one of the hooks

    def __init__(self) -> None:
        self._parents: list[dict[str, Any]] = []  # the runs from which this one was forked, the oldest first
        self._how_to_repeat = ""

    @cached_property
    def origin(self) -> dict[str, Any]:
        """How this run was started."""
        return describe_origin(self.trainer.given_cfg.dump(), device_of(self.trainer.model))

    def before_train(self) -> None:
        fork = self.trainer.cfg.get("FORK")
        if fork is not None and fork.RUN and not self._parents:
            raise ConfigError(
                "--fork is given (FORK.RUN), but the script starts at iteration 0; call "
                "trainer.resume_or_load(resume=args.resume) before train()"
            )
        self._how_to_repeat = ""
        if comm.is_main_process():
            _ = self.origin  # read now: files may change during the run
        if self._is_in_parts():
            logger.info("A step of this run cannot be repeated: its checkpoints are in parts, one of each rank")

    def _is_in_parts(self) -> bool:
        return bool(getattr(getattr(self.trainer.checkpointer, "format", None), "collective", False))

    def before_save(self, state: dict[str, Any]) -> None:
        if isinstance(state.get("trainer"), dict):
            state["trainer"]["origin"] = self._full_origin() if comm.is_main_process() else {}

    def _full_origin(self) -> dict[str, Any]:
        return {**self.origin, "parents": [*self._parents]}

    def after_load(self, state: dict[str, Any]) -> None:
        trainer = state.get("trainer")
        if not isinstance(trainer, dict) or not isinstance(trainer.get("hooks"), dict):
            return  # it is not the file of a DefaultTrainer
        origin, fork = trainer.get("origin"), self.trainer.cfg.get("FORK")
        parents = origin.get("parents", []) if isinstance(origin, dict) else []
        # the file may be older than this hook
        record = trainer["hooks"].setdefault("RunRecord", {"settings": trainer.get("settings", {}), "parents": parents})
        forks = [(parent["run"], parent["iteration"]) for parent in record["parents"]]
        if fork is not None and fork.RUN and (fork.RUN, fork.ITER) not in forks:
            adapt(trainer, self.trainer)

    def after_failure(self, error: BaseException) -> None:
        if active_replay.get() is None and not self._is_in_parts():
            self._how_to_repeat = leave_capsule(self.trainer, error, self._full_origin())

    def after_train(self) -> None:
        if self._how_to_repeat:
            logger.error("To repeat the step: %s", self._how_to_repeat)

    def state_dict(self) -> dict[str, Any]:
        return {"settings": self._settings, "parents": self._parents}

    @cached_property
    def _settings(self) -> dict[str, str]:
        return settings_of(self.trainer.cfg)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._parents, saved = state_dict["parents"], state_dict["settings"]
        if saved and (rows := other_settings(saved, self.trainer.cfg)):  # older states have none
            logger.warning("The checkpoint was written with other settings:\n%s", table_of(rows))
