"""With logical ranks, a run ends with the same bits on 1, 2 and 4 processes, and when their number changes."""

import argparse
import os
import signal

import pytest
import torch
from torch import multiprocessing, nn
from trainkit.projects.replay import replay
from trainkit.projects.replay.tests.job import Job

from tests.engine.job import TinyClassifier, tiny_cfg
from tests.exactness.machine import content
from tests.two_ranks import IMPORTED_ONCE
from trainkit.checkpoint.file import read_file
from trainkit.data import TRANSFORM_REGISTRY, DatasetCatalog
from trainkit.engine import DefaultTrainer, HookBase, default_setup
from trainkit.engine.hooks import HOOK_REGISTRY
from trainkit.modeling import MODEL_REGISTRY
from trainkit.utils import comm

pytestmark = pytest.mark.slow


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


@MODEL_REGISTRY.register()
class Transposed(TinyClassifier):
    """With a weight that is not contiguous."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.layers[0].weight = nn.Parameter(self.layers[0].weight.detach().t().contiguous().t())


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
EVERYTHING = (
    "SOLVER.LOGICAL_RANKS",
    4,
    "SOLVER.MAX_ITER",
    14,
    "SOLVER.ACCUMULATION_STEPS",
    3,
    "HOOKS",
    HOOKS,
)
EVERYTHING += (
    "SOLVER.CHECKPOINT_PERIOD",
    2,
    "TEST.EVAL_PERIOD",
    4,
    "LOG.PERIOD",
    2,
    "LOG.WINDOW",
    5,
)
EVERYTHING += ("MODEL.NAME", "Transposed", "MODEL.DDP.STATIC_GRAPH", True)
EVERYTHING += (
    "SOLVER.AMP.ENABLED",
    True,
    "SOLVER.AMP.PRECISION",
    "bfloat16",
    "CHECKPOINT.ASYNC",
    True,
)
EVERYTHING += (
    "SOLVER.CLIP_GRADIENTS.ENABLED",
    True,
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE",
    "full_model",
)
EVERYTHING += (
    "SOLVER.OPTIMIZER.NAME",
    "AdamW",
    "SOLVER.BASE_LR",
    0.02,
    "DATALOADER.NUM_WORKERS",
    1,
)
EVERYTHING += (
    "DATASETS.VAL",
    ("tiny_val",),
    "CHECKPOINT.BEST_METRIC",
    "loss/total_loss",
    "TEST.IMS_PER_BATCH",
    2,
)
EVERYTHING += ("EARLY_STOPPING.METRIC", "loss/total_loss", "EARLY_STOPPING.PATIENCE", 1)
EVERYTHING += ("EARLY_STOPPING.MIN_DELTA", 1.0)  # the second evaluation is the last
EVERYTHING += (
    "TEST.EVALUATORS",
    ["ClassificationEvaluator", "LossEvaluator"],
    "INPUT.TRAIN_TRANSFORM",
    "Jitter",
)


def train(rank, num_ranks, port, folder, resume, kill_at):
    # of the workers of loaders: others import torch anew
    multiprocessing.set_start_method("fork", force=True)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    torch.set_num_threads(1)
    cfg = tiny_cfg(folder, *EVERYTHING)
    default_setup(cfg, argparse.Namespace(resume=resume, eval_only=False))
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([Kill(kill_at)])
    trainer.resume_or_load(resume)
    trainer.train()
    torch.distributed.destroy_process_group()


def train_on(num_ranks, folder, resume=False, kill_at=-1):
    """On so many processes; whether none of them was killed."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED_ONCE)
    arguments = (num_ranks, store.port, folder, resume, kill_at)
    try:
        multiprocessing.start_processes(
            train, arguments, nprocs=num_ranks, start_method="forkserver"
        )
    except multiprocessing.ProcessExitedException as error:
        if error.exit_code != -signal.SIGKILL:
            raise
        return False
    return True


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("of_four")
    assert train_on(4, folder)
    return folder


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_job_with_everything_ends_with_the_same_bytes_on_any_number_of_processes(
    of_four, tmp_path, num_ranks
):
    assert train_on(num_ranks, tmp_path)
    assert content(tmp_path) == content(of_four)
    state = read_file(of_four / "model_final.pth")
    assert state["trainer"]["iteration"] == 7  # it has stopped early
    assert {"model_best.pth", "model_0000005.pth"} <= content(of_four)[0].keys()
    assert "ranks" not in state
    text = (of_four / "metrics.json").read_text()
    assert all(
        name in text for name in ("grad_norm", "loss/total_loss", "classification/top1", "drawn")
    )


def test_a_run_that_is_killed_goes_on_with_2_then_1_then_4_processes_to_the_same_bytes(
    of_four, tmp_path
):
    for num_ranks, kill_at in ((4, 2), (2, 4), (1, 6)):
        assert not train_on(num_ranks, tmp_path, resume=True, kill_at=kill_at)
    assert train_on(4, tmp_path, resume=True)
    assert content(tmp_path) == content(of_four)


def test_a_step_of_four_processes_is_replayed_in_one_to_the_last_bit(of_four):
    found = replay(of_four, 5, Job(of_four, *EVERYTHING), prove=True)
    proof, _, parts = found.proof.partition(": ")
    assert proof == "every byte equals model_0000005.pth"
    assert parts == "model, optimizer, random state, data, hooks, storage"
    assert found.verdict.startswith("reproducible")
    labels = [sample["label"] for sample in DatasetCatalog.get("tiny_train")]
    # each pass has the samples that the report names
    named = [labels[int(name.split()[1])] for name in found.samples]
    assert named == torch.cat([batch["label"] for batch in found.batch]).tolist()
