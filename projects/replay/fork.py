"""A fork: a run that starts from a checkpoint of another run, its parent. Its settings and its state."""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainkit.projects.replay.checkpoints import Saved, files_of, is_between
from trainkit.projects.replay.origin import (
    changes_since,
    refuse_imports,
    use_a_device_of_this_machine,
    use_settings,
)

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.atomic import replacing, write_text
from trainkit.checkpoint.file import read_file, write_file
from trainkit.checkpoint.folder import RUN_ID, candidates, new_run_id
from trainkit.checkpoint.format import format_of
from trainkit.checkpoint.ranks import together
from trainkit.config import ConfigError
from trainkit.data.samplers import InfiniteSampler
from trainkit.engine import is_restarted
from trainkit.engine.defaults.folders import checkpoint_dir
from trainkit.solver.lr_scheduler import ScheduledLR
from trainkit.utils import comm
from trainkit.utils.device import unwrap_model

logger = logging.getLogger(__name__)


def apply(cfg: Any, args: Any) -> Callable[[], None]:
    """Give ``cfg`` the settings of the run to fork, except its folders, then the changes of the command.

    Every rank calls it. FORK records the parent and the changes. If the fork is resumed, it gets its own settings. The
    function that is returned puts the checkpoint into the folder of the fork, if there is none.
    """
    not_with_fork = ("config_file", "eval_only", "fast_dev_run")
    if any(getattr(args, option, None) for option in not_with_fork):
        raise ConfigError(
            "--fork trains with the settings of RUN: without --config-file, --eval-only, "
            "--fast-dev-run"
        )
    name, number = _run_and_number(args.fork)
    run = os.path.abspath(name)
    own_folders = [cfg.OUTPUT_DIR, cfg.CHECKPOINT.DIR]
    own_imports = cfg.IMPORTS
    for folder in filter(None, own_folders):
        if os.path.realpath(folder) == os.path.realpath(run):
            raise ConfigError(
                f"OUTPUT_DIR or CHECKPOINT.DIR is {run!r}, the folder of the run to fork; name "
                "another"
            )
    own_config = Path(cfg.OUTPUT_DIR, "config.yaml")
    resumes = getattr(args, "resume", False) or is_restarted()

    def find_settings() -> tuple[str, int | None]:
        """Those of the fork; if it is new those of its parent, and the iteration."""
        if resumes and own_config.is_file():
            return own_config.read_text(encoding="utf-8"), None
        saved = _find(run, number - 1)
        return saved.state["trainer"]["origin"]["config"], saved.done

    text, iteration = _of_rank_0(find_settings)
    own_device = cfg.MODEL.DEVICE
    options = getattr(args, "opts", [])
    is_frozen = cfg.is_frozen()
    cfg.defrost()
    use_settings(cfg, text, run)
    use_a_device_of_this_machine(cfg, own_device)
    before = cfg.clone()
    cfg.merge_from_list(options)
    given_keys = options[::2]
    if "IMPORTS" not in given_keys:
        refuse_imports(cfg.IMPORTS, own_imports)
    cfg.OUTPUT_DIR, cfg.CHECKPOINT.DIR = own_folders
    if iteration is not None:
        cfg.FORK.RUN = run
        cfg.FORK.ITER = iteration
        cfg.FORK.CHANGES = [[*change] for change in changes_since(cfg, before)]
    if is_frozen:
        cfg.freeze()

    def when_ready() -> None:
        _of_rank_0(lambda: _copy_checkpoint(cfg.FORK.RUN, cfg.FORK.ITER, checkpoint_dir(cfg)))
        args.resume = True

    return when_ready


def _run_and_number(text: str) -> tuple[str, int]:
    """The two parts of ``RUN@ITERATIONS``; 0 if there is only the run."""
    name, _, number = text.rpartition("@")
    if not name or not number.isdecimal() or os.path.isdir(text):
        return text, 0
    return name, int(number)


def _of_rank_0(find: Callable[[], Any]) -> Any:
    """What ``find`` returns on rank 0, on every rank; its error is raised on every rank."""

    def find_on_rank_0() -> Any:
        return find() if comm.is_main_process() else None

    return comm.broadcast(together(find_on_rank_0))


def _find(run: str, iteration: int) -> Saved:
    """The checkpoint after this iteration; -1: the newest one, if no file that may be newer is damaged."""
    files = files_of(run)
    found = {saved.done: saved for saved in files.checkpoints}
    there = ""
    if found:
        numbers = ", ".join(str(done + 1) for done in found)
        there = f"; there are those after {numbers}"
    if not found or iteration not in (-1, *found):
        raise CheckpointError(
            f"'{run}' has no checkpoint of a DefaultTrainer after {iteration + 1} iterations{there}"
        )
    if iteration != -1:
        return found[iteration]
    newest = found[max(found)]
    for name, damage in files.damaged.items():
        if is_between(name, newest, None):
            raise CheckpointError(
                f"{name} in '{run}' may be its newest checkpoint, and is damaged ({damage}). "
                "Name another one by "
                f"--fork RUN@ITERATIONS{there}"
            )
    return newest


def _copy_checkpoint(run: str, iteration: int, folder: str) -> None:
    if next(candidates(folder), ""):
        return
    saved = _find(run, iteration)
    name = os.path.basename(saved.path)
    for file in format_of(saved.state).files(saved.path):
        copy = os.path.join(folder, os.path.relpath(file, run))
        if os.path.isfile(file) and file != saved.path:
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            with open(file, "rb") as source, replacing(copy) as target:
                shutil.copyfileobj(source, target)
    # another run than its parent, whose later checkpoints are not its own
    state = {**read_file(saved.path), RUN_ID: new_run_id()}
    write_file(state, os.path.join(folder, name))
    write_text(name, os.path.join(folder, "last_checkpoint"))


def adapt(state: dict[str, Any], trainer: Any) -> None:
    """Change the state of the parent's trainer so that ``trainer``, which has not trained yet, can load it.

    If settings differ, the trainer's settings are used, also for values that the state holds: the rates of the
    optimizer, and seeds. Writers continue at the same iteration, in their own files.
    """
    fork = trainer.cfg.FORK
    parent = {"run": fork.RUN, "iteration": state["iteration"], "changes": fork.CHANGES}
    logger.info("The run is a fork of %s", describe_parent(parent))
    done = state["iteration"] + 1
    if done >= trainer.max_iter:
        raise ConfigError(
            f"SOLVER.MAX_ITER is {trainer.max_iter}, but the checkpoint to fork has done {done}"
        )
    changed = [key for key, _, _ in fork.CHANGES]
    parents = [*state["origin"]["parents"], parent]
    state["origin"] = {
        **state["origin"],
        "config": trainer.given_cfg.dump(),
        "parents": parents,
    }
    state["end"] = {**state["end"], "finished_early": None}
    _start_files_anew(state, trainer.state_dict()["hooks"])
    has_own_rates = any(key.startswith("SOLVER.") for key in changed)
    if has_own_rates and isinstance(trainer.scheduler, ScheduledLR):
        _refuse_other_groups(trainer)
        _take_own_rates(state, trainer)
    if "SEED" in changed:
        _take_own_seed(state, trainer)


def _start_files_anew(state: dict[str, Any], own_hooks: Mapping[str, Any]) -> None:
    """Give the writers in ``state`` the state of the fork's own writers; they go on after the same iterations."""
    hooks = dict(state["hooks"])
    for name in state["hooks"]:
        if not name.startswith("PeriodicWriter") or name not in own_hooks:
            continue
        taken: dict[str, Any] = {}
        for writer in hooks[name]["writers"]:
            taken[writer["class"]] = writer["state"].get("taken", {})
        hooks[name] = own_hooks[name]
        for writer in hooks[name]["writers"]:
            # nothing is in its files yet; what is there was written by this fork before it was killed
            anew = {"taken": taken.get(writer["class"], {}), "length": 0, "sizes": {}}
            for key, value in anew.items():
                if key in writer["state"]:
                    writer["state"][key] = value
    state["hooks"] = hooks


def _take_own_rates(state: dict[str, Any], trainer: Any) -> None:
    """Give the optimizer and the schedule in ``state`` the rates of the fork."""
    step = dict(state["_trainer"])
    own_groups = trainer.optimizer.state_dict()["param_groups"]
    step["optimizer"] = {**step["optimizer"], "param_groups": own_groups}
    state["_trainer"] = step
    own_rates = trainer.scheduler.state_dict()["base_lrs"]
    for name, hook in state["hooks"].items():
        if name.startswith("LRScheduler"):
            # -1: it seeks its position
            state["hooks"][name] = {**hook, "base_lrs": own_rates, "last_epoch": -1}


def _take_own_seed(state: dict[str, Any], trainer: Any) -> None:
    """Leave the random state out of ``state``, and go on in the order of the data of the fork's own seed."""
    state["rng"] = None
    batches = getattr(trainer.data_loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, InfiniteSampler) and state["data"]:
        order = sampler.state_dict(state["data"]["position"])
        state["data"] = {**state["data"], "seed": sampler.seed, "order": order}


def _refuse_other_groups(trainer: Any) -> None:
    """Raises ConfigError if the parent's optimizer is another one, or has other groups: its state goes by place."""
    cfg = trainer.cfg.clone()
    cfg.defrost()
    changed: list[str] = []
    for key, former, _ in trainer.cfg.FORK.CHANGES:
        if key.startswith("SOLVER."):
            cfg.merge_from_list([key, former])
            changed.append(key)
    of_parent = trainer.build_optimizer(cfg, unwrap_model(trainer.model))
    if _groups_of(trainer.optimizer) != _groups_of(of_parent):
        raise ConfigError(
            "a fork has the optimizer and the parameter groups of its parent; "
            f"{', '.join(changed)} would change them"
        )


def _groups_of(optimizer: Any) -> tuple[type, list[list[int]]]:
    """The class, and the parameters of each group."""
    groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    return type(optimizer), groups


def describe_parent(parent: Mapping[str, Any]) -> str:
    """One line of text for an entry of ``parents`` in the origin of a checkpoint."""
    texts = [f"{parent['run']}, iteration {parent['iteration']}"]
    for key, former, now in parent["changes"]:
        texts.append(f"{key} {now!r} instead of {former!r}")
    if not parent["changes"]:
        texts.append("no other settings")
    return ", ".join(texts)
