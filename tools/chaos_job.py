#!/usr/bin/env python
"""The run that ``chaos.py`` kills: a small job that uses everything that has a state.

The environment variable TRAINKIT_CHAOS has the options of one start, as JSON::

    {"kill": {"point": "forward", "iter": 30, "count": 1, "rank": 0, "alone": false},
     "without": "trainer/rng", "entropy": 7, "report": "starts/004.jsonl"}

``kill``: from iteration ``iter`` on, at the ``count``-th time that ``rank`` passes ``point``, all processes are killed,
or only this rank if ``alone``. ``without``: this part of the checkpoint is not loaded. ``entropy``: replaces the random
bytes of the operating system from which SEED -1 is drawn. ``report``: a file for the events, in lines of JSON. All are
optional.
"""

import argparse
import builtins
import io
import json
import mmap
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit.config import CfgNode, get_cfg
from trainkit.data import TRANSFORM_REGISTRY, DatasetCatalog
from trainkit.engine import (
    DefaultTrainer,
    HookBase,
    Priority,
    default_setup,
    launch,
    user_errors_exit,
)
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils import comm
from trainkit.utils.events import writers

HELD_SEC = 5  # how long a save waits for the training to pass a point
GRACE_SEC = 30  # like torchrun, which gives the other ranks this time after one has died


# ---------------------------------------------------------------------------- the kill


class _Killer:
    """Called at each point that the program passes; kills the program at the planned point."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.without, self._report = plan.get("without", ""), plan.get("report", "")
        self._rank, self._pid = int(os.environ.get("RANK", 0)), os.getpid()
        kill = plan.get("kill")
        self._kill = kill if kill and kill["rank"] == self._rank else None
        self._left = kill["count"] if kill else 0
        self._iter = mmap.mmap(-1, 8)  # loader workers see it too
        self._holds_save = False

    @property
    def iter(self) -> int:
        return int.from_bytes(self._iter[:8], "little")

    @iter.setter
    def iter(self, iter: int) -> None:
        self._iter[:8] = iter.to_bytes(8, "little")

    def report(self, **entries: Any) -> None:
        if self._report and (self._rank == 0 or "killed_at" in entries):
            with open(self._report, "a") as file:
                file.write(json.dumps(entries) + "\n")

    def at(self, point: str, file: str = "", first: Callable[[], object] | None = None) -> None:
        """The program passes a point; ``file`` is the file concerned, ``first`` is called before the kill."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if self._holds_save and in_main_thread:
            self._strike()
        if self._kill is None or point != self._kill["point"] or self.iter < self._kill["iter"]:
            return
        self._left -= 1
        if self._left == 0:
            if first is not None:
                first()
            if point == "a step during a save" and not in_main_thread:
                self._holds_save = True
                time.sleep(HELD_SEC)  # useless if the training waits for this save
            self._strike(file)

    def _strike(self, file: str = "") -> None:
        assert self._kill is not None
        is_worker = os.getpid() != self._pid
        thread = "loader worker" if is_worker else threading.current_thread().name
        self.report(
            killed_at=self.iter, by=", ".join(filter(None, [f"rank {self._rank}", thread, file]))
        )
        if self._kill["alone"]:
            os.kill(self._pid, signal.SIGKILL)
        else:
            os.killpg(os.getpgrp(), signal.SIGKILL)


_killer = _Killer({})


def _add_fail_points() -> None:
    """Make each write, fsync and rename of a file a point where the run can be killed."""

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            name = os.path.basename(str(self.name))
            if name.startswith(("log.txt", "events")):
                return super().write(data)
            point = "write of metrics" if name == "metrics.json" else "write"
            _killer.at("a step during a save", name)
            _killer.at(point, name, first=lambda: super(File, self).write(data[: len(data) // 2]))
            return super().write(data)

    open_file = builtins.open

    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if mode == "xb" and buffering == 0 and str(file).endswith(".trainkit-tmp"):
            return File(file, "x")
        return open_file(file, mode, buffering, *args, **kwargs)

    os.replace, os.fsync = _between_points("rename", os.replace), _between_points("fsync", os.fsync)
    builtins.open = opened
    writers.FileIO = File  # type: ignore[misc]


def _between_points(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        file = os.path.basename(args[-1]) if isinstance(args[-1], str) else ""
        _killer.at("a step during a save", file)
        _killer.at(f"before {name}", file)
        result = function(*args, **kwargs)
        _killer.at(f"after {name}", file)
        return result

    return call


# ---------------------------------------------------------------------------- the job


def _samples(size: int, seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(size, 12, generator=generator)
    labels = (features[:, :3] + torch.randn(size, 3, generator=generator)).argmax(1)
    return [
        {"features": row, "label": int(label)} for row, label in zip(features, labels, strict=True)
    ]


DatasetCatalog.register("chaos_train", partial(_samples, 120, 0))
DatasetCatalog.register("chaos_val", partial(_samples, 24, 1))
DatasetCatalog.register("chaos_test", partial(_samples, 24, 2))


@TRANSFORM_REGISTRY.register()
class ChaosTransform:
    """Draws numbers from each of the three global generators."""

    def __init__(self, cfg: CfgNode) -> None:
        pass

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        _killer.at("fetch")
        noise = 0.1 * torch.from_numpy(np.random.randn(12)).float() + 0.1 * torch.randn(12)
        return sample | {"features": random.uniform(0.8, 1.2) * sample["features"] + noise}


@MODEL_REGISTRY.register()
class ChaosNet(nn.Module):
    """Draws random numbers while it trains, and has buffers that differ between ranks."""

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 3)
        )

    def forward(self, batch: dict[str, Tensor]) -> Any:
        if not self.training:
            return self.layers(batch["features"])
        _killer.at("forward")
        return self.losses(batch)

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        scores = self.layers(batch["features"])
        return {
            "loss_cls": F.cross_entropy(scores, batch["label"]),
            "loss_size": 0.01 * scores.square().mean(),
        }


@HOOK_REGISTRY.register()
class KillPoint(HookBase):
    """A place among the hooks where the run can be killed; the place "first" also drops a part of the loaded state."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._is_first = place == "first"

    def before_train(self) -> None:
        if self._is_first:
            _killer.report(start_iter=self.trainer.start_iter)
            _killer.iter = self.trainer.start_iter
        _killer.at("before_train")

    def before_step(self) -> None:
        if self._is_first:
            _killer.iter = self.trainer.iter

    def after_backward(self) -> None:
        if self._is_first:
            _killer.at("after_backward")

    def after_step(self) -> None:
        _killer.at(f"after_step, {self._place}")
        _killer.at("a step, all saved", first=self.trainer.checkpointer.wait)

    def after_eval_step(self, phase: str, index: int, inputs: Any, outputs: Any) -> None:
        if self._is_first:
            _killer.at("evaluation")

    def after_train(self) -> None:
        _killer.at("after_train")

    def after_load(self, state: dict[str, Any]) -> None:
        if not self._is_first or not _killer.without:
            return
        if _killer.without == "ranks":  # now each rank has its own part
            state |= comm.broadcast(state)
        else:
            fresh = {"model": self.trainer.model.state_dict(), "trainer": self.trainer.state_dict()}
            replace_part(state, fresh, _killer.without)


class Smoothed(HookBase):
    """Reads the batch and the losses in ``after_step``, and has a state; it is registered last."""

    def __init__(self) -> None:
        self._value = 0.0

    def after_step(self) -> None:
        total = sum(self.trainer.losses.values()).item() + len(self.trainer.batch)
        self._value = 0.9 * self._value + 0.1 * total
        self.trainer.storage.put_scalar("smoothed", self._value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._value = state_dict["value"]


class CountEvaluated(HookBase):
    """A hook below the save point: counts the iterations with a new result, and stores their learning rate."""

    priority = Priority.LOW

    def __init__(self) -> None:
        self._count, self._last = 0, -1

    def after_step(self) -> None:
        # without "lr" if the storage is left out of a checkpoint
        latest = self.trainer.storage.latest()
        self.trainer.storage.put_scalar(
            "used_lr", latest.get("lr", (0.0, -1))[0], smoothing_hint=False
        )
        seen = latest.get("loss/total_loss", (0.0, -1))[1]
        if comm.is_main_process() and seen > self._last:
            self._count, self._last = self._count + 1, seen
            self.trainer.storage.put_scalar("num_evaluated", self._count, smoothing_hint=False)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "last": self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._count, self._last = state_dict["count"], state_dict["last"]


def replace_part(state: Any, fresh: Any, part: str) -> None:
    """Replace a part of ``state`` by the same part of ``fresh``; remove it if ``fresh`` does not have it."""
    *parents, key = part.split("/")
    for parent in parents:
        state, fresh = state[parent], fresh.get(parent, {})
    if fresh.get(key):  # before its start, a run has an empty storage and no average
        state[key] = fresh[key]
    else:
        state.pop(key, None)


def job_config(
    output_dir: Path, seed: int, config_seed: int, num_workers: int, logical_ranks: int = 0
) -> CfgNode:
    """The config of the job; ``seed`` chooses between its variants. The periods have no common factor."""
    cfg, rng = get_cfg(), random.Random(seed)
    cfg.OUTPUT_DIR, cfg.SEED, cfg.MODEL.NAME, cfg.MODEL.DEVICE = (
        str(output_dir),
        config_seed,
        "ChaosNet",
        "cpu",
    )
    cfg.INPUT.TRAIN_TRANSFORM = "ChaosTransform"
    cfg.DATASETS.TRAIN, cfg.DATASETS.VAL, cfg.DATASETS.TEST = (
        ("chaos_train",),
        ("chaos_val",),
        ("chaos_test",),
    )
    cfg.DATALOADER.NUM_WORKERS, cfg.DATALOADER.PERSISTENT_WORKERS = num_workers, rng.random() < 0.5
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.ACCUMULATION_STEPS = 90, 16, 2
    cfg.SOLVER.OPTIMIZER.NAME, cfg.SOLVER.BASE_LR = rng.choice([("AdamW", 0.01), ("SGD", 0.1)])
    cfg.SOLVER.LR_SCHEDULER_NAME, cfg.SOLVER.WARMUP_ITERS = "WarmupCosineLR", 10
    cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.PRECISION = True, "bfloat16"
    cfg.SOLVER.CLIP_GRADIENTS.ENABLED, cfg.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = True, "full_model"
    cfg.SOLVER.CHECKPOINT_PERIOD, cfg.TEST.EVAL_PERIOD, cfg.LOG.PERIOD = 7, 11, 5
    cfg.CHECKPOINT.ASYNC, cfg.CHECKPOINT.MAX_TO_KEEP, cfg.LOG.ASYNC = True, 2, rng.random() < 0.5
    cfg.LOG.WRITERS = ["json"]
    cfg.TEST.EVALUATORS, cfg.TEST.IMS_PER_BATCH = ["ClassificationEvaluator", "LossEvaluator"], 2
    cfg.SOLVER.LOGICAL_RANKS = logical_ranks
    # logical ranks refuse PreciseBN
    cfg.TEST.PRECISE_BN.ENABLED, cfg.TEST.PRECISE_BN.NUM_ITER = (
        not logical_ranks,
        2,
    )
    metric = "loss/total_loss"
    cfg.CHECKPOINT.BEST_METRIC = cfg.EARLY_STOPPING.METRIC = metric
    cfg.EARLY_STOPPING.PATIENCE = rng.choice([4, 100])
    cfg.HOOKS = [
        {"NAME": "EMAHook", "DECAY": 0.9, "EVALUATE": rng.choice(["ema", "both"])},
        {
            "NAME": "ReduceOnPlateau",
            "VAL_METRIC": metric,
            "MODE": "min",
            "PATIENCE": 0,
            "FACTOR": 0.9,
        },
        {"NAME": "ParamScheduler", "PARAM": "weight_decay", "SCHEDULES": [{"NAME": "Linear"}]},
        {"NAME": "Throughput"},
        {"NAME": "KillPoint", "PLACE": "first", "PRIORITY": "HIGHEST"},
        {"NAME": "KillPoint", "PLACE": "after the save", "PRIORITY": 56},
        {"NAME": "KillPoint", "PLACE": "last", "PRIORITY": "LOWEST"},
    ]
    cfg.freeze()
    return cfg


def train(args: argparse.Namespace, plan: Mapping[str, Any]) -> None:
    """Train on one rank of one start."""
    global _killer
    torch.set_num_threads(1)
    _killer = _Killer(plan)
    with user_errors_exit():
        cfg = job_config(
            args.output_dir, args.seed, args.config_seed, args.workers, args.logical_ranks
        )
        default_setup(cfg, args)
        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load(resume=args.resume)
        # as scripts for detectron2 do; the losses of one process depend on the number of processes
        trainer.register_hooks(
            [CountEvaluated()] if args.logical_ranks else [Smoothed(), CountEvaluated()]
        )
        trainer.train()


# ---------------------------------------------------------------------------- the processes


def _train_killably(args: argparse.Namespace, plan: Mapping[str, Any]) -> None:
    _add_fail_points()
    if plan.get("entropy") is not None:
        os.urandom = random.Random(plan["entropy"]).randbytes
    train(args, plan)


def _run_rank(rank: int, port: int, args: argparse.Namespace, plan: Mapping[str, Any]) -> None:
    """Run a rank with the environment that torchrun sets."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ |= {"WORLD_SIZE": str(args.processes), "LOCAL_WORLD_SIZE": str(args.processes)}
    launch(_train_killably, 1, args=(args, plan))


def run_ranks(args: argparse.Namespace, plan: Mapping[str, Any]) -> int:
    """Run all ranks until they end or the first one dies, like torchrun; returns the exit code.

    The ranks are forked: a new process would take longer to import torch than to train.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_run_rank, args=(rank, port, args, plan))
        for rank in range(args.processes)
    ]
    for process in ranks:
        process.start()
    running = list(ranks)
    while running and not any(process.exitcode for process in ranks):
        multiprocessing.connection.wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]
    code = min(process.exitcode or 0 for process in ranks) or max(
        process.exitcode or 0 for process in ranks
    )
    for process in running:
        process.terminate()
    deadline = time.monotonic() + GRACE_SEC
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        # inside torch it waits for a rank that has ended; no signal reaches it there
        if process.is_alive():
            process.kill()
            process.join()
    return 128 - code if code < 0 else code


def main() -> int:
    """Run with the options of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="chooses the variant of the job")
    parser.add_argument("--config-seed", type=int, default=0, help="SEED of the job; -1: draw one")
    parser.add_argument(
        "--logical-ranks", type=int, default=0, help="SOLVER.LOGICAL_RANKS of the job"
    )
    parser.add_argument("--workers", type=int, default=2, help="loader workers of each process")
    args, plan = parser.parse_args(), json.loads(os.environ.get("TRAINKIT_CHAOS", "{}"))
    if args.processes > 1:
        return run_ranks(args, plan)
    _train_killably(args, plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
