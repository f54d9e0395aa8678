"""A fork: a run that starts from a checkpoint of another run, its parent. Its settings and its state."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.folder import candidates, checkpoint_files, choose
from trainkit.checkpoint.ranks import together
from trainkit.config import CfgNode, ConfigError
from trainkit.config.config import plain_value
from trainkit.config.yaml_files import load_yaml
from trainkit.data.samplers.infinite import InfiniteSampler
from trainkit.engine.origin import checkpoints_with_origin
from trainkit.engine.project import Project
from trainkit.engine.settings import changes_since, settings_of
from trainkit.solver.hyper_parameters import check_saved_groups
from trainkit.solver.lr_scheduler import ScheduledLR
from trainkit.utils import comm

logger = logging.getLogger(__name__)


def take_settings(cfg: CfgNode, place: str, changes: Sequence[str], resume: bool) -> None:
    """Give ``cfg`` the settings of the run to fork, except its folders, then the changes of the command.

    Every rank calls it. FORK records the parent and the changes. If the fork is resumed, it gets the settings with
    which it was started.

    Args:
        place: ``RUN`` or ``RUN@ITER``.
        changes: ``KEY VALUE ...`` of the command.

    Raises:
        CheckpointError: there is no such checkpoint.
        ConfigError: the fork would use a folder of the run to fork, or a change is not valid; or IMPORTS of that run
            has a module that is not in the project.
    """
    name, _, number = place.rpartition("@")
    if "://" in place:
        raise ConfigError(f"--fork {place}: copy the run to a local folder, and fork that one")
    if not name or not number.isdecimal() or os.path.isdir(place):
        name, number = place, "-1"
    run, iteration, own = os.path.abspath(name), int(number), Path(cfg.OUTPUT_DIR, "config.yaml")
    text = _of_rank_0(lambda: own.read_text() if resume and own.is_file() else "")
    former, folders = load_yaml(text, str(own)).get("FORK", {}), [run]
    if former.get("RUN") == run and iteration in (-1, former["ITER"]):
        done, iteration = former["CHANGES"], former["ITER"]  # now the run to fork may have newer checkpoints
    else:
        _, iteration, origin = _of_rank_0(lambda: _find(run, iteration))
        done, text = [], origin["config"]
        folders += [os.path.join(origin["folder"], load_yaml(text, run)["OUTPUT_DIR"])]

    frozen, own_folders = cfg.is_frozen(), (cfg.OUTPUT_DIR, cfg.CHECKPOINT.DIR)
    for folder in filter(None, own_folders):
        if os.path.realpath(folder) in map(os.path.realpath, folders):
            raise ConfigError(f"OUTPUT_DIR or CHECKPOINT.DIR is {folder!r}, a folder of the run to fork; name another")
    own_imports = [*cfg.IMPORTS]
    cfg.defrost()
    cfg.merge_from_other_cfg(load_yaml(text, run))
    before = cfg.clone()
    cfg.merge_from_list(changes)
    if "IMPORTS" not in changes[::2]:
        Project(left_out=run).check_imports(cfg.IMPORTS, own_imports)
    done += map(list, changes_since(cfg, before))
    cfg.OUTPUT_DIR, cfg.CHECKPOINT.DIR = own_folders
    cfg.FORK.RUN, cfg.FORK.ITER, cfg.FORK.CHANGES = run, iteration, plain_value("FORK.CHANGES", done)
    if frozen:
        cfg.freeze()


def path_of_parent(cfg: CfgNode) -> str:
    """The path of the checkpoint that FORK names. Every rank calls it. Raises CheckpointError: there is none."""
    return _of_rank_0(lambda: _find(cfg.FORK.RUN, cfg.FORK.ITER))[0]


def _of_rank_0(find: Callable[[], Any]) -> Any:
    return comm.broadcast(together(lambda: find() if comm.is_main_process() else None))


def _find(run: str, iteration: int) -> tuple[str, int, dict[str, Any]]:
    """The checkpoint after this iteration (-1: the one that `--resume` takes), and how its run was started."""
    found: dict[int, tuple[str, int, dict[str, Any]]] = {}
    for saved in checkpoints_with_origin(
        checkpoint_files(run) if iteration >= 0 else filter(None, [choose(candidates(run))[0]])
    ):
        done = saved.iteration - (saved.stage == 1)
        found.setdefault(done, (saved.path, done, saved.state["trainer"]["origin"]))
    if not found:
        needed = "name the folder with the checkpoints of a DefaultTrainer, written by this version or a later one"
        raise CheckpointError(f"'{run}' has no checkpoint to fork; {needed}")
    if iteration not in (-1, *found):
        there = ", ".join(map(str, sorted(found)))
        raise CheckpointError(f"'{run}' has no checkpoint of iteration {iteration}; there are those of {there}")
    return found[max(found) if iteration < 0 else iteration]


def forked(state: Mapping[str, Any], trainer: Any) -> dict[str, Any]:
    """Change the state of another run so that ``trainer``, which has not trained yet, can load it.

    If settings differ, the trainer's settings are used, also for values that the state holds: the rates of the
    optimizer, and seeds. Writers continue at the same iteration, in their own files. The list ``parents`` in the origin
    gets the other run as its last entry.
    """
    fork, saved, own = trainer.cfg.FORK, state["settings"], settings_of(trainer.cfg)
    parent = {"run": fork.RUN, "iteration": state["iteration"], "changes": fork.CHANGES}
    logger.info("The run is a fork of %s", describe_parent(parent))
    origin = {"parents": [*state["origin"].get("parents", []), parent]}
    state = {**state, "settings": own, "origin": origin, "position": {**state["position"], "finished_early": None}}
    step, hooks, own_hooks = dict(state["_trainer"]), dict(state["hooks"]), trainer._hook_list.state_dict()
    for name in [name for name in hooks if name.startswith("PeriodicWriter") and name in own_hooks]:
        taken = {writer["class"]: writer["state"].get("taken", {}) for writer in hooks[name]["writers"]}
        hooks[name] = own_hooks[name]
        for writer in hooks[name]["writers"]:
            writer["state"] |= {"taken": taken.get(writer["class"], {})} if "taken" in writer["state"] else {}
    changed = {key for key in own.keys() | saved.keys() if own.get(key) != saved.get(key)}
    has_rates = any(key.startswith("SOLVER.") for key in changed)
    if has_rates and not isinstance(trainer.scheduler, ScheduledLR):
        logger.warning("%s cannot take other rates: those of that run stay", type(trainer.scheduler).__name__)
    elif has_rates:
        check_saved_groups(step["optimizer"]["param_groups"], trainer.optimizer)
        step["optimizer"] = {**step["optimizer"], "param_groups": trainer.optimizer.state_dict()["param_groups"]}
        rates = {"base_lrs": trainer.scheduler.state_dict()["base_lrs"], "last_epoch": -1}  # -1: it seeks its position
        hooks |= {name: {**hooks[name], **rates} for name in hooks if name.startswith("LRScheduler")}
    if "SOLVER.AMP.INIT_SCALE" in changed:
        step["grad_scaler"] = trainer._trainer.step_state_dict()["grad_scaler"]
    if "SEED" in changed:
        state["rng"] = None
        sampler = getattr(getattr(trainer.data_loader, "batch_sampler", None), "sampler", None)
        if isinstance(sampler, InfiniteSampler) and state["data"]:
            order = sampler.state_dict(state["data"]["position"])
            state["data"] = {**state["data"], "seed": sampler.seed, "order": order}
    return {**state, "_trainer": step, "hooks": hooks}


def describe_parent(parent: Mapping[str, Any]) -> str:
    """One line of text for an entry of ``parents`` in the origin of a checkpoint."""
    changes = [f"{key} {now!r} instead of {former!r}" for key, former, now in parent["changes"]]
    return ", ".join([f"{parent['run']}, iteration {parent['iteration']}", *(changes or ["no other settings"])])
