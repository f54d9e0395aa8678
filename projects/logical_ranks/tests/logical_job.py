"""Jobs whose runs have to end with the same bits on any number of processes."""

import argparse
import json
import os
import signal

import torch
from torch import multiprocessing

from tests.engine.job import tiny_cfg
from tests.two_ranks import IMPORTED_ONCE
from trainkit.data import TRANSFORM_REGISTRY
from trainkit.engine import DefaultTrainer, HookBase, default_setup
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.utils import comm


@TRANSFORM_REGISTRY.register()
def Jitter(cfg):
    """Draws from torch's generator."""
    return lambda sample: {**sample, "x": sample["x"] + 0.1 * torch.randn(4)}


@HOOK_REGISTRY.register()
class Draw(HookBase):
    """Stores what it draws from the global generator; rank 0 draws twice."""

    def after_step(self):
        self.trainer.storage.put_scalar("drawn", torch.rand(()).item())
        if comm.is_main_process():
            torch.rand(())


class Kill(HookBase):
    def __init__(self, at):
        self.at = at

    def after_step(self):
        if self.trainer.iter == self.at and comm.get_rank() == comm.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)


HOOKS = [
    {"NAME": "EMAHook", "DECAY": 0.9, "EVALUATE": "ema"},
    {"NAME": "ReduceOnPlateau", "VAL_METRIC": "loss/total_loss", "PATIENCE": 0, "FACTOR": 0.5},
    {"NAME": "Draw"},
]
# periods without a common divisor; 40 samples in epochs of 1 2/3 iterations of 3 times 8; 12 samples to evaluate
EVERYTHING = ("SOLVER.LOGICAL_RANKS", 4, "SOLVER.MAX_ITER", 14, "SOLVER.ACCUMULATION_STEPS", 3, "HOOKS", HOOKS)
EVERYTHING += ("SOLVER.CHECKPOINT_PERIOD", 2, "TEST.EVAL_PERIOD", 4, "LOG.PERIOD", 2, "LOG.WINDOW", 5)
EVERYTHING += ("SOLVER.AMP.ENABLED", True, "SOLVER.AMP.PRECISION", "bfloat16", "CHECKPOINT.ASYNC", True)
EVERYTHING += ("SOLVER.CLIP_GRADIENTS.ENABLED", True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "full_model")
EVERYTHING += ("SOLVER.OPTIMIZER.NAME", "AdamW", "SOLVER.BASE_LR", 0.02, "DATALOADER.NUM_WORKERS", 1)
EVERYTHING += ("DATASETS.VAL", ("tiny_val",), "CHECKPOINT.BEST_METRIC", "loss/total_loss", "TEST.IMS_PER_BATCH", 2)
EVERYTHING += ("EARLY_STOPPING.METRIC", "loss/total_loss", "EARLY_STOPPING.PATIENCE", 1)
EVERYTHING += ("EARLY_STOPPING.MIN_DELTA", 1.0)  # the second evaluation is the last
EVERYTHING += ("TEST.EVALUATORS", ["ClassificationEvaluator", "LossEvaluator"], "INPUT.TRAIN_TRANSFORM", "Jitter")


def train(folder, options=(), resume=False, kill_at=-1):
    """In this process, or this rank."""
    torch.set_num_threads(1)
    cfg = tiny_cfg(folder, *options)
    default_setup(cfg, argparse.Namespace(resume=resume, eval_only=False))
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([Kill(kill_at)] if kill_at >= 0 else [])
    trainer.resume_or_load(resume)
    trainer.train()


def train_rank(rank, num_ranks, port, arguments):
    multiprocessing.set_start_method("fork", force=True)  # of the workers of loaders: others import torch anew
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    train(**arguments)
    torch.distributed.destroy_process_group()


def train_on(num_ranks, folder, options=(), **more):
    """On so many processes; whether none of them was killed."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED_ONCE)
    arguments = {"folder": folder, "options": options, **more}
    try:
        multiprocessing.start_processes(
            train_rank, (num_ranks, store.port, arguments), nprocs=num_ranks, start_method="forkserver"
        )
    except multiprocessing.ProcessExitedException as error:
        if error.exit_code != -signal.SIGKILL:
            raise
        return False
    return True


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
