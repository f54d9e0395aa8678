"""The user's job: it is built again, with other settings, and run for some steps in a temporary folder."""

import hashlib
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset
from trainkit.projects.graph.recorder import CudaRecorder
from trainkit.projects.preflight.findings import Finding, NotAsked, judge
from trainkit.projects.preflight.options import record_reads

from trainkit.config import get_cfg
from trainkit.data import DatasetCatalog
from trainkit.engine import DefaultTrainer
from trainkit.utils import comm
from trainkit.utils.device import accelerator_runs_ahead, device_of, move_to_device, unwrap_model
from trainkit.utils.env import seed_all_rng
from trainkit.utils.events import EventStorage

STEPS = 20  # of the ordinary run
_READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}
_LIBRARIES = ("<", __file__, f"{Path(torch.__file__).parent}{os.sep}", f"{Path(comm.__file__).parents[1]}{os.sep}")
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")


class Watcher(TorchDispatchMode):
    """Notes what happens in steps; a place is the innermost line that is not in torch or trainkit.

    Attributes:
        sec: part of a step -> seconds, for each step.
        trained: names of the parameters that had a gradient which is not zero.
        reads: the place of each read of a tensor in a forward pass, and of each copy from or to the host; on CUDA of
            all that waits for the device.
        fired: (number of the ReLU in its pass, place) -> for each channel, whether it was ever above zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sec, self.trained, self.reads = list[dict[str, float]](), set[str](), list[str]()
        self.fired = dict[tuple[int, str], Tensor]()

    def step(self, trainer: Any, batch: Any) -> None:
        """Make a step by its parts, and its forward pass once more, or twice."""
        trainer.optimizer.zero_grad()
        losses, forward = timed(trainer.compute_losses, batch)
        _, backward = timed(trainer.backward, losses.total)
        named = unwrap_model(trainer.model).named_parameters()
        self.trained |= {name for name, value in named if value.grad is not None and value.grad.any()}
        self.sec.append({"forward": forward, "backward": backward, "update": timed(trainer.update)[1]})
        self._number = 0
        with self:
            trainer.compute_losses(batch)
        if next(trainer.model.parameters()).is_cuda:  # the dispatcher does not see all
            waits = list[str]()
            with CudaRecorder.watching(waits):
                trainer.compute_losses(batch)
            self.reads += [f"a wait at {line}" for line in waits if not str(self.reads).count(line)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
        devices = {leaf.device.type for leaf in tree_leaves((args, results)) if isinstance(leaf, Tensor)}
        is_read = name in _READS or (name in ("copy_", "_to_copy") and len(devices) > 1)
        if is_read or name in ("relu", "relu_"):
            stack = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_LIBRARIES)][-1:]
            place = "".join(f"{name} at {frame.filename}:{frame.lineno}" for frame in stack)
            self.reads += [place] * is_read
        if name in ("relu", "relu_"):
            self._number += 1
            fires = (results > 0).movedim(-1 if results.ndim == 3 else 1, 0).flatten(1).any(1)  # 3: [N, length, C]
            self.fired[self._number, place] = fires | self.fired.get((self._number, place), fires)
        return results


class Job:
    """The user's job: ``trainer`` as built by the user, not trained; ``cfg`` as given; ``folder`` is temporary."""

    def __init__(self, trainer: Any, given: Mapping[str, Any], command: Sequence[str]) -> None:
        self.trainer, self.model, self.folder = trainer, unwrap_model(trainer.model), trainer.cfg.OUTPUT_DIR
        self._command = [*command, *(["--num-gpus", "1"] if comm.get_world_size() > 1 else [])]
        self._number, self.cfg = 0, get_cfg()
        self.cfg.merge_from_other_cfg(given)
        record_reads(self.cfg)

    def ask(self, check: Any) -> Iterator[Finding]:
        """The findings of a check."""
        try:
            found = check(self)
            yield from [found] if isinstance(found, Finding) else found
        except NotAsked as error:
            reason, name = (*error.args, check.__name__)[:2]
            yield Finding(name, "not asked", reason)
        except (Exception, SystemExit) as error:
            yield judge(check.__name__, True, f"{type(error).__name__}: {error}"[:300], "the job has to run")

    def build(self, *options: Any) -> Any:
        """A new trainer, as in a process that has just started."""
        cfg, self._number = self.cfg.clone(), self._number + 1
        own = ["OUTPUT_DIR", f"{self.folder}/{self._number}", "CHECKPOINT.DIR", "", "SEED", max(cfg.SEED, 0)]
        cfg.merge_from_list([*own, "TEST.MAX_BATCHES", 1, *options])
        seed_all_rng(cfg.SEED)
        trainer = self.trainer.__class__(cfg)
        trainer.resume_or_load(resume=False)
        return trainer

    @cached_property
    def ordinary(self) -> Any:
        """A trainer after `STEPS` steps."""
        trainer = self.build()
        trainer.train(0, min(STEPS, trainer.max_iter))
        return trainer

    @cached_property
    def one_batch(self) -> Any:
        """A trainer after 30 steps with one batch and the full learning rate."""
        constant = ["SOLVER.WARMUP_ITERS", 0, "SOLVER.STEPS", (), "SOLVER.LR_SCHEDULER_NAME", "WarmupMultiStepLR"]
        trainer = self.build(*constant)
        trainer.data_loader = self.batches[:1] * 30
        trainer.train(0, min(30, trainer.max_iter))
        return trainer

    @cached_property
    def batches(self) -> list[Any]:
        """The first 8 batches, on the device of the model."""
        device = device_of(self.model) or torch.device("cpu")
        return [move_to_device(batch, device) for batch in islice(self.build().data_loader, 8)]

    @cached_property
    def watched(self) -> Watcher:
        """What happens in steps with the first batches, after the ordinary run."""
        if self.trainer.__class__.run_step is not DefaultTrainer.run_step:
            raise NotAsked("this trainer makes its steps itself", "gradients, dead, host_reads, loader")
        watcher = Watcher()
        for batch in self.batches:
            with EventStorage():
                watcher.step(self.ordinary, batch)
        return watcher

    @cached_property
    def datasets(self) -> list[list[Any]]:
        """The datasets of TRAIN, and those of VAL and TEST, as far as they have indices."""
        names = self.cfg.DATASETS
        both = names.TRAIN, {*names.VAL, *names.TEST} - {*names.TRAIN}
        found = [[DatasetCatalog.get(name) for name in each if name in DatasetCatalog] for each in both]
        sized = [[one for one in each if isinstance(one, Sized)] for each in found]
        return [[one for one in each if not isinstance(one, IterableDataset)] for each in sized]

    @cached_property
    def short_run(self) -> Path:
        """The folder of six steps of the user's command in a new process, which saves after three steps."""
        own = "OUTPUT_DIR", self.folder, "SEED", f"{max(self.cfg.SEED, 0)}"
        done = self._run(*self._command, "--fast-dev-run", *own)
        if done.returncode:
            raise RuntimeError(f"with --fast-dev-run the command ends with {done.returncode}: {done.stderr[-200:]}")
        return Path(self.folder, "fast_dev_run")

    @cached_property
    def replayed(self) -> dict[str, str]:
        """What a replay of a step of the short run says: "on the way", "proof" and "verdict"."""
        words = [sys.executable, "-m", "trainkit.projects.replay", str(self.short_run), "--iter", "4", "--prove", "--"]
        lines = self._run(*words, *self._command).stdout.splitlines()
        return dict(line.split(": ", 1) for line in lines if ": " in line)

    def _run(self, *words: str) -> Any:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(_OF_RANKS)}
        options: Any = {"env": environ, "capture_output": True, "text": True, "check": False}
        return comm.broadcast(subprocess.run(words, **options) if comm.is_main_process() else None)


def timed(call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """The result of a call, and its seconds."""
    wait = torch.accelerator.synchronize if accelerator_runs_ahead() else lambda: None
    wait()
    started, result = time.perf_counter(), call(*args)
    wait()
    return result, time.perf_counter() - started


def digest(value: Any) -> str:
    leaves = [leaf.cpu().numpy().tobytes() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(value)]
    return hashlib.sha256(pickle.dumps(leaves)).hexdigest()


def classes_of(item: Any, ndim: int = 0) -> list[int]:
    """The class of a sample, or those of a batch (``ndim`` 1); none if it has none."""
    is_pair = isinstance(item, list | tuple) and len(item) == 2
    found = item.get("label", item.get("labels")) if isinstance(item, dict) else item[1] if is_pair else None
    label = torch.as_tensor(found) if isinstance(found, Tensor | Integral) else torch.empty(())
    return [] if label.is_floating_point() or label.ndim != ndim else label.reshape(-1).tolist()
