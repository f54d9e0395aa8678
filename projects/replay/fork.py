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
    if any(getattr(args, option, None) for option in ("config_file", "eval_only", "fast_dev_run")):
        raise ConfigError(
            "--fork trains with the settings of RUN: without --config-file, --eval-only, --fast-dev-run"
        )
    name, _, number = args.fork.rpartition("@")
    if not name or not number.isdecimal() or os.path.isdir(args.fork):
        name, number = args.fork, "0"
    run, own_folders, own_imports = (
        os.path.abspath(name),
        (cfg.OUTPUT_DIR, cfg.CHECKPOINT.DIR),
        cfg.IMPORTS,
    )
    if any(os.path.realpath(folder) == os.path.realpath(run) for folder in own_folders if folder):
        raise ConfigError(
            f"OUTPUT_DIR or CHECKPOINT.DIR is {run!r}, the folder of the run to fork; name another"
        )
    own, resumes = (
        Path(cfg.OUTPUT_DIR, "config.yaml"),
        getattr(args, "resume", False) or is_restarted(),
    )

    def find_settings() -> tuple[str, int | None]:
        """Those of the fork; if it is new those of its parent, and the iteration."""
        if resumes and own.is_file():
            return own.read_text(), None
        saved = _find(run, int(number) - 1)
        return saved.state["trainer"]["origin"]["config"], saved.done

    text, iteration = _of_rank_0(find_settings)
    own_device = cfg.MODEL.DEVICE
    frozen, options = cfg.is_frozen(), getattr(args, "opts", [])
    cfg.defrost()
    use_settings(cfg, text, run)
    use_a_device_of_this_machine(cfg, own_device)
    before = cfg.clone()
    cfg.merge_from_list(options)
    if "IMPORTS" not in options[::2]:
        refuse_imports(cfg.IMPORTS, own_imports)
    cfg.OUTPUT_DIR, cfg.CHECKPOINT.DIR = own_folders
    if iteration is not None:
        changes = [[*change] for change in changes_since(cfg, before)]
        cfg.FORK.RUN, cfg.FORK.ITER, cfg.FORK.CHANGES = run, iteration, changes
    if frozen:
        cfg.freeze()

    def when_ready() -> None:
        _of_rank_0(lambda: _copy_checkpoint(cfg.FORK.RUN, cfg.FORK.ITER, checkpoint_dir(cfg)))
        args.resume = True

    return when_ready


def _of_rank_0(find: Callable[[], Any]) -> Any:
    return comm.broadcast(together(lambda: find() if comm.is_main_process() else None))


def _find(run: str, iteration: int) -> Saved:
    """The checkpoint after this iteration; -1: the newest one, if no file that may be newer is damaged."""
    files = files_of(run)
    found = {saved.done: saved for saved in files.checkpoints}
    there = f"; there are those after {', '.join(str(done + 1) for done in found)}" if found else ""
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
                f"{name} in '{run}' may be its newest checkpoint, and is damaged ({damage}). Name another one by "
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
    fork, origin = trainer.cfg.FORK, state["origin"]
    parent = {"run": fork.RUN, "iteration": state["iteration"], "changes": fork.CHANGES}
    logger.info("The run is a fork of %s", describe_parent(parent))
    if (done := state["iteration"] + 1) >= trainer.max_iter:
        raise ConfigError(
            f"SOLVER.MAX_ITER is {trainer.max_iter}, but the checkpoint to fork has done {done}"
        )
    own, changed = trainer.state_dict(), [key for key, *_ in fork.CHANGES]
    state["origin"] = {
        **origin,
        "config": trainer.given_cfg.dump(),
        "parents": [*origin["parents"], parent],
    }
    step = dict(state["_trainer"])
    end = {**state["end"], "finished_early": None}
    hooks = dict(state["hooks"])
    for name in [
        name for name in hooks if name.startswith("PeriodicWriter") and name in own["hooks"]
    ]:
        taken = {
            writer["class"]: writer["state"].get("taken", {}) for writer in hooks[name]["writers"]
        }
        hooks[name] = own["hooks"][name]
        for writer in hooks[name]["writers"]:
            # nothing is in its files yet; what is there was written by this fork before it was killed
            anew = {"taken": taken.get(writer["class"], {}), "length": 0, "sizes": {}}
            writer["state"] |= {key: value for key, value in anew.items() if key in writer["state"]}
    if any(key.startswith("SOLVER.") for key in changed) and isinstance(
        trainer.scheduler, ScheduledLR
    ):
        _refuse_other_groups(trainer)
        step["optimizer"] = {
            **step["optimizer"],
            "param_groups": trainer.optimizer.state_dict()["param_groups"],
        }
        # -1: it seeks its position
        rates = {
            "base_lrs": trainer.scheduler.state_dict()["base_lrs"],
            "last_epoch": -1,
        }
        hooks |= {
            name: {**hooks[name], **rates} for name in hooks if name.startswith("LRScheduler")
        }
    if "SEED" in changed:
        state["rng"] = None
        sampler = getattr(getattr(trainer.data_loader, "batch_sampler", None), "sampler", None)
        if isinstance(sampler, InfiniteSampler) and state["data"]:
            order = sampler.state_dict(state["data"]["position"])
            state["data"] = {**state["data"], "seed": sampler.seed, "order": order}
    state |= {"_trainer": step, "hooks": hooks, "end": end}


def _refuse_other_groups(trainer: Any) -> None:
    """Raises ConfigError if the parent's optimizer is another one, or has other groups: its state goes by place."""
    cfg = trainer.cfg.clone()
    cfg.defrost()
    changes = [change for change in trainer.cfg.FORK.CHANGES if change[0].startswith("SOLVER.")]
    cfg.merge_from_list([each for key, former, _ in changes for each in (key, former)])
    both = trainer.optimizer, trainer.build_optimizer(cfg, unwrap_model(trainer.model))
    now, former = (
        [type(each), *([*map(id, group["params"])] for group in each.param_groups)] for each in both
    )
    if now != former:
        keys = ", ".join(key for key, *_ in changes)
        raise ConfigError(
            f"a fork has the optimizer and the parameter groups of its parent; {keys} would change them"
        )


def describe_parent(parent: Mapping[str, Any]) -> str:
    """One line of text for an entry of ``parents`` in the origin of a checkpoint."""
    changes = [f"{key} {now!r} instead of {former!r}" for key, former, now in parent["changes"]]
    return ", ".join(
        [f"{parent['run']}, iteration {parent['iteration']}", *(changes or ["no other settings"])]
    )
