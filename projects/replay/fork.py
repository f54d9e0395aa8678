"""A fork: a run that starts from a checkpoint of another run, its parent. Its settings and its state."""

import argparse
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainkit.projects.replay.origin import Saved, checkpoints_with_origin
from trainkit.projects.replay.project import Project
from trainkit.projects.replay.settings import changes_since, other_settings, settings_of

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.atomic import replacing, write_text
from trainkit.checkpoint.folder import candidates, checkpoint_files, choose, find_checkpoint
from trainkit.checkpoint.format import format_of
from trainkit.checkpoint.ranks import together
from trainkit.config import CfgNode, ConfigError
from trainkit.config.config import plain_value
from trainkit.config.yaml_files import load_yaml
from trainkit.data.samplers import InfiniteSampler
from trainkit.engine import is_restarted
from trainkit.engine.folders import checkpoint_dir
from trainkit.solver.lr_scheduler import ScheduledLR
from trainkit.solver.param_groups import compare_with_saved
from trainkit.utils import comm

logger = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--fork``."""
    text = "start from another run after so many iterations (default: its newest checkpoint), with its settings"
    parser.add_argument("--fork", default="", metavar="RUN[@ITERATIONS]", help=text)


def apply(cfg: Any, args: Any) -> Callable[[], None]:
    """Give ``cfg`` the settings of the run to fork, except its folders, then the changes of the command.

    Every rank calls it. FORK records the parent and the changes. If the fork is resumed, it gets the settings with
    which it was started. The function that is returned puts the checkpoint into the folder of the fork, if there is
    none, and sets ``args.resume``.

    Raises:
        CheckpointError: there is no such checkpoint.
        ConfigError: an option does not go together with ``--fork``; the fork would use a folder of the run to fork; a
            change is not valid; IMPORTS of that run has a module that is not in the project.
    """
    place: str = args.fork
    name, _, number = place.rpartition("@")
    if any(getattr(args, option, None) for option in ("config_file", "eval_only", "fast_dev_run")):
        raise ConfigError(
            "--fork trains with the settings of RUN; leave out --config-file, --eval-only, --fast-dev-run"
        )
    if "://" in place or not isinstance(cfg, CfgNode):
        raise ConfigError(f"--fork {place}: accepted: a local folder with the checkpoints of a DefaultTrainer")
    if not name or not number.isdecimal() or os.path.isdir(place):
        name, number = place, "0"
    run, iteration, own = os.path.abspath(name), int(number) - 1, Path(cfg.OUTPUT_DIR, "config.yaml")
    resumes = getattr(args, "resume", False) or is_restarted()
    text = _of_rank_0(lambda: own.read_text() if resumes and own.is_file() else "")
    former, folders = load_yaml(text, str(own)).get("FORK", {}), [run]
    if former.get("RUN") == run and iteration in (-1, former["ITER"]):
        done, iteration = former["CHANGES"], former["ITER"]  # now the run to fork may have newer checkpoints
    else:
        iteration, origin = _of_rank_0(lambda: _find(run, iteration)[1:])
        done, text = [], origin["config"]
        folders += [os.path.join(origin["folder"], load_yaml(text, run)["OUTPUT_DIR"])]
    own_folders, own_imports, frozen = (cfg.OUTPUT_DIR, cfg.CHECKPOINT.DIR), [*cfg.IMPORTS], cfg.is_frozen()
    for folder in filter(None, own_folders):
        if os.path.realpath(folder) in map(os.path.realpath, folders):
            raise ConfigError(f"OUTPUT_DIR or CHECKPOINT.DIR is {folder!r}, a folder of the run to fork; name another")
    cfg.defrost()
    cfg.merge_from_other_cfg(load_yaml(text, run))
    before, changes = cfg.clone(), getattr(args, "opts", [])
    cfg.merge_from_list(changes)
    if "IMPORTS" not in changes[::2]:
        Project(left_out=run).check_imports(cfg.IMPORTS, own_imports)
    done += map(list, changes_since(cfg, before))
    cfg.OUTPUT_DIR, cfg.CHECKPOINT.DIR = own_folders
    cfg.FORK.RUN, cfg.FORK.ITER, cfg.FORK.CHANGES = run, iteration, plain_value("FORK.CHANGES", done)
    if frozen:
        cfg.freeze()

    def when_ready() -> None:
        _of_rank_0(lambda: _copy_checkpoint(run, iteration, checkpoint_dir(cfg)))
        args.resume = True

    return when_ready


def _of_rank_0(find: Callable[[], Any]) -> Any:
    return comm.broadcast(together(lambda: find() if comm.is_main_process() else None))


def _find(run: str, iteration: int) -> tuple[Saved, int, dict[str, Any]]:
    """The checkpoint after this iteration (-1: the one that `--resume` takes), and how its run was started."""
    found: dict[int, tuple[Saved, int, dict[str, Any]]] = {}
    paths = checkpoint_files(run) if iteration >= 0 else filter(None, [choose(candidates(run))[0]])
    for saved in checkpoints_with_origin(paths):
        done = saved.iteration - (saved.stage == 1)
        found.setdefault(done, (saved, done, saved.state["trainer"]["origin"]))
    if not found:
        needed = "name the folder with the checkpoints of a DefaultTrainer, written by this version or a later one"
        raise CheckpointError(f"'{run}' has no checkpoint to fork; {needed}")
    if iteration not in (-1, *found):
        there = ", ".join(str(done + 1) for done in sorted(found))
        raise CheckpointError(
            f"'{run}' has no checkpoint after {iteration + 1} iterations; there are those after {there}"
        )
    return found[max(found) if iteration < 0 else iteration]


def _copy_checkpoint(run: str, iteration: int, folder: str) -> None:
    """Put the parent's checkpoint, and the record of its batch, into a folder without checkpoints; tag it."""
    if find_checkpoint(folder):
        return
    saved = _find(run, iteration)[0]
    os.makedirs(folder, exist_ok=True)
    for file in [os.path.join(run, "batch.json"), *format_of(saved.state).files(saved.path)]:
        copy = os.path.join(folder, os.path.relpath(file, run))
        if os.path.isfile(file):
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            with open(file, "rb") as source, replacing(copy) as target:
                shutil.copyfileobj(source, target)
    write_text(os.path.basename(saved.path), os.path.join(folder, "last_checkpoint"))


def adapt(state: dict[str, Any], trainer: Any) -> None:
    """Change the state of the parent's trainer so that ``trainer``, which has not trained yet, can load it.

    If settings differ, the trainer's settings are used, also for values that the state holds: the rates of the
    optimizer, and seeds. Writers continue at the same iteration, in their own files.

    Raises:
        ConfigError: the state is beyond SOLVER.MAX_ITER.
    """
    fork, record = trainer.cfg.FORK, state["hooks"]["RunRecord"]
    parent = {"run": fork.RUN, "iteration": state["iteration"], "changes": fork.CHANGES}
    logger.info("The run is a fork of %s", describe_parent(parent))
    if (done := state["iteration"] + 1) >= trainer.max_iter:
        raise ConfigError(
            f"SOLVER.MAX_ITER is {trainer.max_iter}, but the checkpoint to fork has done {done} iterations"
        )
    own, changed = trainer.state_dict(), [key for key, *_ in other_settings(record["settings"], trainer.cfg)]
    record = {"settings": settings_of(trainer.cfg), "parents": [*record["parents"], parent]}
    hooks = state["hooks"] | {"RunRecord": record}
    step, position = dict(state["_trainer"]), {**state["position"], "finished_early": None}
    for name in [name for name in hooks if name.startswith("PeriodicWriter") and name in own["hooks"]]:
        taken = {writer["class"]: writer["state"].get("taken", {}) for writer in hooks[name]["writers"]}
        hooks[name] = own["hooks"][name]
        for writer in hooks[name]["writers"]:
            # nothing is in its files yet; what is there was written by this fork before it was killed
            anew = {"taken": taken.get(writer["class"], {}), "length": 0, "sizes": {}}
            writer["state"] |= {key: value for key, value in anew.items() if key in writer["state"]}
    has_rates = any(key.startswith("SOLVER.") for key in changed)
    if has_rates and not isinstance(trainer.scheduler, ScheduledLR):
        logger.warning("%s cannot take other rates: those of that run stay", type(trainer.scheduler).__name__)
    elif has_rates:
        compare_with_saved(trainer.optimizer.param_groups, step["optimizer"]["param_groups"])
        step["optimizer"] = {**step["optimizer"], "param_groups": trainer.optimizer.state_dict()["param_groups"]}
        rates = {"base_lrs": trainer.scheduler.state_dict()["base_lrs"], "last_epoch": -1}  # -1: it seeks its position
        hooks |= {name: {**hooks[name], **rates} for name in hooks if name.startswith("LRScheduler")}
    if "SOLVER.AMP.INIT_SCALE" in changed:
        step["grad_scaler"] = own["_trainer"]["grad_scaler"]
    if "SEED" in changed:
        state["rng"] = None
        sampler = getattr(getattr(trainer.data_loader, "batch_sampler", None), "sampler", None)
        if isinstance(sampler, InfiniteSampler) and state["data"]:
            order = sampler.state_dict(state["data"]["position"])
            state["data"] = {**state["data"], "seed": sampler.seed, "order": order}
    state |= {"_trainer": step, "hooks": hooks, "position": position}


def describe_parent(parent: Mapping[str, Any]) -> str:
    """One line of text for an entry of ``parents`` in the origin of a checkpoint."""
    changes = [f"{key} {now!r} instead of {former!r}" for key, former, now in parent["changes"]]
    return ", ".join([f"{parent['run']}, iteration {parent['iteration']}", *(changes or ["no other settings"])])
