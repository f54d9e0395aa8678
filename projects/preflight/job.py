"""The user's job: it is built again, with other settings, and run for some steps in a temporary folder."""

import hashlib
import os
import pickle
import shlex
import subprocess
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainkit.projects.graph.recorder import CudaRecorder
from trainkit.projects.preflight.findings import Finding, NotAsked, judge
from trainkit.projects.preflight.memory import has_room, search
from trainkit.projects.preflight.options import record_reads

from trainkit.config import get_cfg
from trainkit.engine.hook_base import HookBase, Priority
from trainkit.utils import comm
from trainkit.utils.device import accelerator_runs_ahead, unwrap_model
from trainkit.utils.env import seed_all_rng
from trainkit.utils.periods import exact

STEPS = 20  # of the ordinary run
_READS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
}
_LIBRARIES = (
    "<",
    __file__,
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(comm.__file__).parents[1]}{os.sep}",
)
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")


class Watcher(HookBase, TorchDispatchMode):
    """Notes the time of the odd steps of a run, and what happens in the forward passes of the even ones.

    Attributes:
        sec: part of the odd steps -> seconds of all; "update" starts after the backward pass.
        trained: names of the parameters that had a gradient which is not zero.
        reads: the place of each read of a tensor, and of each copy from or to the host; on CUDA of all that waits for
            the device. A place is the innermost line that is not in torch or trainkit.
        fired: (number of the ReLU in its pass, place) -> for each channel, whether it was ever above zero.
    """

    priority = Priority.HIGHEST
    _now, _looks = 0.0, True

    def __init__(self) -> None:
        super().__init__()
        self.sec, self.trained, self.reads = defaultdict[str, float](float), set[str](), list[str]()
        self.fired, self._pass = dict[tuple[int, str], Tensor](), ExitStack()

    def before_train(self) -> None:
        model = unwrap_model(self.trainer.model)  # another hook may copy it, but not this hook
        model.register_forward_pre_hook(lambda model, _: self._enter(model))
        model.register_forward_hook(lambda model, *_: self._leave(model), always_call=True)

    def before_step(self) -> None:
        self._end("hooks")
        self._looks, self._number, self._before = self.trainer.iter % 2 == 0, 0, "data"

    def after_backward(self) -> None:
        self._end("backward")

    def after_step(self) -> None:
        self._end("update")

    def _end(self, part: str) -> None:
        if accelerator_runs_ahead():
            torch.accelerator.synchronize()
        before, self._now = self._now, time.perf_counter()
        if self._looks:
            named = unwrap_model(self.trainer.model).named_parameters()
            self.trained |= {
                name for name, value in named if value.grad is not None and value.grad.any()
            }
        else:
            self.sec[part] += self._now - before

    @torch.compiler.disable
    def _enter(self, model: nn.Module) -> None:
        if model.training:  # it may be evaluated between two steps
            self._end(self._before)
            if self._looks:
                sees_all = (
                    next(model.parameters()).is_cuda and self.trainer.iter % 4 == 0
                )  # the dispatcher does not
                self._pass.enter_context(CudaRecorder.watching(self.reads) if sees_all else self)

    @torch.compiler.disable
    def _leave(self, model: nn.Module) -> None:
        self._pass.close()
        if model.training:
            self._end("forward")
            self._before = "backward"  # of this micro-batch, before the next one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results, name = (
            func(*args, **(kwargs or {})),
            func._schema.name.removeprefix("aten::").rstrip("_"),
        )
        devices = {
            leaf.device.type for leaf in tree_leaves((args, results)) if isinstance(leaf, Tensor)
        }
        if name in ("relu", *_READS) or (name in ("copy", "_to_copy") and len(devices) > 1):
            stack = [
                frame
                for frame in traceback.extract_stack()
                if not frame.filename.startswith(_LIBRARIES)
            ][-1:]
            place = "".join(f"{name} at {frame.filename}:{frame.lineno}" for frame in stack)
            if name != "relu":
                self.reads.append(place)
                return results
            self._number += 1
            fires = (
                (results > 0).movedim(-1 if results.ndim == 3 else 1, 0).flatten(1).any(1)
            )  # 3: [N, length, C]
            self.fired[self._number, place] = fires | self.fired.get((self._number, place), fires)
        return results


class Job:
    """The user's job: ``trainer`` as built by the user, not trained; ``cfg`` as given; ``folder`` is temporary."""

    def __init__(self, trainer: Any, given: Mapping[str, Any], command: str) -> None:
        self.trainer, self.model, self.folder = (
            trainer,
            unwrap_model(trainer.model),
            trainer.cfg.OUTPUT_DIR,
        )
        self.command = [
            *shlex.split(command),
            *(["--num-gpus", "1"] if comm.get_world_size() > 1 else []),
        ]
        self.watcher, self.cfg, self._number = Watcher(), get_cfg(), 0
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
        except Exception as error:
            yield judge(
                check.__name__, True, f"{type(error).__name__}: {error}"[:300], "the job has to run"
            )

    def build(self, *options: Any) -> Any:
        """A new trainer, as in a process that has just started."""
        cfg, self._number = self.cfg.clone(), self._number + 1
        own = [
            "OUTPUT_DIR",
            f"{self.folder}/{self._number}",
            "CHECKPOINT.DIR",
            "",
            "SEED",
            max(cfg.SEED, 0),
        ]
        own += ["LOG.WRITERS", ["json"], "TEST.MAX_BATCHES", 1, "TEST.EXPECTED_RESULTS", []]
        cfg.merge_from_list([*own, *options])
        seed_all_rng(cfg.SEED)
        trainer = self.trainer.__class__(cfg)
        trainer.resume_or_load(resume=False)
        return trainer

    def make_steps(self) -> None:
        """``ordinary``: a trainer after `STEPS` steps; ``sec``: of a step's parts; ``batches``: 8, on the device."""
        self.ordinary = self.build()
        self.ordinary.register_hooks([self.watcher])
        self.ordinary.train(0, min(STEPS, self.ordinary.max_iter))
        self.sec = {part: sec / (self.ordinary.iter // 2) for part, sec in self.watcher.sec.items()}
        trainer = self.build()
        self.batches = [trainer.fetch() for _ in range(8)]

    def largest_batch(self, times: float) -> str:
        """The largest size of a batch in words; ``times`` the present one fits for sure."""
        now = self.cfg.SOLVER.IMS_PER_BATCH
        size = max(now, int(now // comm.get_world_size() * times))
        # memory of the machine that runs out ends other programs, and ranks would have to agree
        if not accelerator_runs_ahead() or comm.get_world_size() > 1:
            return f"at least {size}"
        of_epoch = (
            round(now * exact(self.trainer.iters_per_epoch)) if self.trainer.has_epochs else size
        )

        def fits(size: int) -> bool:
            return has_room(lambda: self.build("SOLVER.IMS_PER_BATCH", size).train(0, 2))

        return str(search(fits, min(size, of_epoch), lambda: of_epoch))

    def start(self, name: str, *options: str, code: int = 0, **environ: str) -> Path:
        """The folder of six steps of the user's command, in a new process; it saves after the third and the last."""
        own = (
            "OUTPUT_DIR",
            f"{self.folder}/{name}",
            "SEED",
            f"{max(self.cfg.SEED, 0)}",
            "LOG.WRITERS",
            "['json']",
        )
        done = self.run(
            *self.command,
            "--fast-dev-run",
            *options,
            *own,
            "CHECKPOINT.MAX_TO_KEEP",
            "2",
            **environ,
        )
        if done.returncode != code:
            text = " ".join(["with --fast-dev-run", *options, "the command ends with"])
            raise RuntimeError(f"{text} {done.returncode}: {done.stderr[-200:]}")
        return Path(self.folder, name, "fast_dev_run")

    def run(self, *words: str, **environ: str) -> Any:
        """A new process, which is no rank of this job."""
        environ |= {
            key: value for key, value in os.environ.items() if not key.startswith(_OF_RANKS)
        }
        options: Any = {"env": environ, "capture_output": True, "text": True, "check": False}
        return comm.broadcast(subprocess.run(words, **options) if comm.is_main_process() else None)


def digest(value: Any) -> str:
    leaves = [
        leaf.cpu().numpy().tobytes() if isinstance(leaf, Tensor) else leaf
        for leaf in tree_leaves(value)
    ]
    return hashlib.sha256(pickle.dumps(leaves)).hexdigest()


def classes_of(item: Any, ndim: int = 0) -> list[int]:
    """The class of a sample, or those of a batch (``ndim`` 1); none if it has none."""
    is_pair = isinstance(item, list | tuple) and len(item) == 2
    found = (
        item.get("label", item.get("labels"))
        if isinstance(item, dict)
        else item[1]
        if is_pair
        else None
    )
    label = torch.as_tensor(found) if isinstance(found, Tensor | Integral) else torch.empty(())
    return [] if label.is_floating_point() or label.ndim != ndim else label.reshape(-1).tolist()
