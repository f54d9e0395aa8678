"""The user's job: it is built again, with other settings, and run for some steps in a temporary folder."""

import hashlib
import os
import pickle
import shlex
import subprocess
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainkit.projects.fast_dev.options import fast_dev_config
from trainkit.projects.finders.memory import has_room, search
from trainkit.projects.graph.recorder import CudaRecorder
from trainkit.projects.preflight.findings import Finding, NotAsked, judge
from trainkit.projects.preflight.options import record_reads

from trainkit.config import get_cfg
from trainkit.engine.hook_base import HookBase, Priority
from trainkit.utils import comm
from trainkit.utils.device import accelerator_runs_ahead, unwrap_model
from trainkit.utils.env import seed_all_rng

STEPS = 20  # of the ordinary run
NEVER = 10**9  # iterations
EVALUATED = 4  # batches of an evaluation
# settings: the full learning rate from the first step on
CONSTANT_RATE: tuple[Any, ...] = (
    "SOLVER.LR_SCHEDULER_NAME",
    "WarmupMultiStepLR",
    "SOLVER.WARMUP_ITERS",
    0,
    "SOLVER.STEPS",
    (),
)
_READS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
}
_OF_SCORES = (
    "_log_softmax",
    "nll_loss_forward",
    "nll_loss2d_forward",
    "binary_cross_entropy_with_logits",
)
_LIBRARIES = (
    "<",
    __file__,
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(comm.__file__).parents[1]}{os.sep}",
)
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")


class Until(HookBase):
    """Ends a run after some steps as "stopped", so that nothing is evaluated at its end."""

    priority = Priority.LOWEST

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def after_step(self) -> None:
        if self.trainer.iter + 1 == self._steps:
            self.at_end()
            self.trainer.request_stop("the check has seen enough")

    def at_end(self) -> None:
        """Called after the last step."""


class _Mark:
    """Lives as long as the node of a graph that holds it."""


class Watcher(HookBase, TorchDispatchMode):
    """Notes the time of the odd steps of a run, and what happens in the forward passes of the even ones.

    Attributes:
        sec: part of the odd steps -> seconds of all; "update" starts after the backward pass.
        trained: names of the parameters that had a gradient which is not zero.
        reads: the place of each read of a tensor, and of each copy from or to the host; on CUDA of all that waits for
            the device. A place is the innermost line that is not in torch or trainkit.
        fired: (number of the ReLU in its pass, place) -> for each channel, whether it was ever above zero.
        squashed: place of a loss of scores -> what its input was in all steps; "" if it may be scores.
        smallest: name of a batch norm that is trained -> the smallest number of samples that it got.
        watched: the steps whose forward passes were watched.
    """

    priority = Priority.HIGHEST

    def __init__(self) -> None:
        super().__init__()
        self.sec: dict[str, float] = defaultdict(float)
        self.trained: set[str] = set()
        self.reads: list[str] = []
        self.fired: dict[tuple[int, str], Tensor] = {}
        self._pass = ExitStack()  # what watches the present forward pass
        self._now = 0.0  # when the last part has ended
        self._looks = True  # at the present step
        self.squashed: dict[str, str] = {}
        self.smallest: dict[str, int] = {}
        self.watched: set[int] = set()
        self._marks: list[tuple[int, Any]] = []  # (step, weak reference to the mark of its graph)
        self._made: list[tuple[int, Any]] = []  # (step, weak reference to a result of its pass)

    def before_train(self) -> None:
        model = unwrap_model(self.trainer.model)  # another hook may copy it, but not this hook
        model.register_forward_pre_hook(lambda model, _: self._enter(model))
        model.register_forward_hook(
            lambda model, _, outputs: self._leave(model, outputs), always_call=True
        )
        for name, part in model.named_modules():
            if isinstance(part, _BatchNorm):
                part.register_forward_pre_hook(partial(self._count_samples, name))

    @torch.compiler.disable
    def _count_samples(self, name: str, norm: nn.Module, inputs: Any) -> None:
        if norm.training:
            number = len(inputs[0])
            if isinstance(norm, nn.SyncBatchNorm):
                number *= comm.get_world_size()
            self.smallest[name] = min(number, self.smallest.get(name, number))

    def before_step(self) -> None:
        self._end("hooks")
        self._looks = self.trainer.iter % 2 == 0
        self._number = 0  # of ReLUs in the pass
        self._before = "data"  # the part before the forward pass

    def after_backward(self) -> None:
        self._end("backward")

    def after_step(self) -> None:
        self._end("update")

    def _end(self, part: str) -> None:
        if accelerator_runs_ahead():
            torch.accelerator.synchronize()
        before = self._now
        self._now = time.perf_counter()
        if not self._looks:
            self.sec[part] += self._now - before
            return
        for name, value in unwrap_model(self.trainer.model).named_parameters():
            if value.grad is not None and value.grad.any():
                self.trained.add(name)

    @torch.compiler.disable
    def _enter(self, model: nn.Module) -> None:
        if not model.training:  # it may be evaluated between two steps
            return
        self._end(self._before)
        if not self._looks:
            return
        is_cuda = next(model.parameters()).is_cuda
        if is_cuda and self.trainer.iter % 4 == 0:
            # it sees all that waits, which the dispatcher does not
            self._pass.enter_context(CudaRecorder.watching(self.reads))
        else:
            self._pass.enter_context(self)
            self.watched.add(self.trainer.iter)

    @torch.compiler.disable
    def _leave(self, model: nn.Module, outputs: Any) -> None:
        self._pass.close()
        if model.training:
            self._mark_graph(outputs)
            self._end("forward")
            self._before = "backward"  # of this micro-batch, before the next one

    def _mark_graph(self, outputs: Any) -> None:
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                mark = _Mark()
                metadata: Any = leaf.grad_fn.metadata
                metadata["preflight"] = mark
                self._marks.append((self.trainer.iter, weakref.ref(mark)))

    def steps_with_graph(self) -> int:
        """The number of steps whose graphs are still there."""
        return len({step for step, mark in self._marks if mark() is not None})

    def steps_with_tensors(self) -> dict[int, int]:
        """Step -> the bytes of the tensors that its forward pass has made and that are still there."""
        model = unwrap_model(self.trainer.model)
        tensors = [*model.parameters(), *model.buffers()]
        own = {_address(value) for value in tensors if _is_plain(value)}
        held: dict[int, int] = {}
        for step, reference in self._made:
            tensor = reference()
            if tensor is not None and _address(tensor) not in own:
                own.add(_address(tensor))  # the later ones share its memory
                held[step] = held.get(step, 0) + tensor.untyped_storage().nbytes()
        return held

    def _look_at_scores(self, name: str, args: Any) -> None:
        """Note whether the input of a loss that takes scores, or their logarithms, is something else."""
        values = args[0].detach().float()
        if name == "nll_loss_forward" or name == "nll_loss2d_forward":
            is_squashed = bool((values.logsumexp(1).abs() > 0.05).any())
            what = "no logarithms of probabilities"
        elif name == "_log_softmax" and values.shape[args[1]] == 1:
            return
        else:
            is_squashed = bool(values.min() >= 0) and bool(values.max() <= 1)
            what = "all between 0 and 1"
        place = self._place(name)
        before = self.squashed.get(place, what)
        self.squashed[place] = before if is_squashed else ""

    @staticmethod
    def _place(name: str) -> str:
        """The innermost line that is not in torch or trainkit."""
        for frame in reversed(traceback.extract_stack()):
            if not frame.filename.startswith(_LIBRARIES):
                return f"{name} at {frame.filename}:{frame.lineno}"
        return ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        for leaf in tree_leaves(results):
            if _is_plain(leaf):
                self._made.append((self.trainer.iter, weakref.ref(leaf)))
        if name in _OF_SCORES and args[0].numel():
            self._look_at_scores(name, args)
        if name == "relu":
            self._look_at_relu(results)
        elif name in _READS:
            self.reads.append(self._place(name))
        elif name in ("copy", "_to_copy"):
            leaves = tree_leaves((args, results))
            devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
            if len(devices) > 1:
                self.reads.append(self._place(name))
        return results

    def _look_at_relu(self, results: Tensor) -> None:
        """Note for each channel whether it was ever above zero."""
        self._number += 1
        key = self._number, self._place("relu")
        channels = -1 if results.ndim == 3 else 1  # 3: [N, length, C]
        fires = (results > 0).movedim(channels, 0).flatten(1).any(1)
        self.fired[key] = fires | self.fired.get(key, fires)


class Job:
    """The user's job: ``trainer`` as built by the user, not trained; ``cfg`` as given; ``folder`` is temporary."""

    def __init__(self, trainer: Any, given: Mapping[str, Any], command: str) -> None:
        self.trainer = trainer
        self.model = unwrap_model(trainer.model)
        self.folder = trainer.cfg.OUTPUT_DIR
        self.command = shlex.split(command)
        if comm.get_world_size() > 1:
            self.command += ["--num-gpus", "1"]
        self.watcher = Watcher()
        self.cfg = get_cfg()
        self._number = 0  # of trainers that were built
        self.learned: Any = None  # a trainer that has learned one batch
        self.evaluation: Any = None  # its `Evaluation`
        self.own_answers: Any = None  # the `Answers` of its model for this batch
        self.answers: Any = None  # those for other batches of the first pass over TRAIN
        self.cfg.merge_from_other_cfg(given)
        record_reads(self.cfg)

    def ask(self, check: Any) -> Iterator[Finding]:
        """The findings of a check."""
        name: str = check.__name__
        try:
            found = check(self)
            if isinstance(found, Finding):
                yield found
            else:
                yield from found
        except NotAsked as error:
            reason, *names = error.args
            yield Finding(names[0] if names else name, "not asked", reason)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:300]
            yield judge(name, True, text, "the job has to run")

    def build(self, *options: Any) -> Any:
        """A new trainer, as in a process that has just started; ``options``: KEY, VALUE, KEY, VALUE, ..."""
        self._number += 1
        cfg = self.cfg.clone()
        own = {
            "OUTPUT_DIR": f"{self.folder}/{self._number}",
            "CHECKPOINT.DIR": "",
            "SEED": max(cfg.SEED, 0),
            "LOG.WRITERS": ["json"],
            "TEST.MAX_BATCHES": min(cfg.TEST.MAX_BATCHES or EVALUATED, EVALUATED),
            "TEST.EXPECTED_RESULTS": [],
            # only `Evaluation` evaluates; early stopping needs a period
            "TEST.EVAL_PERIOD": NEVER if cfg.TEST.EVAL_PERIOD else 0,
            "TEST.EVAL_START": 0,
            "TEST.EVAL_AT_START": False,
            "STOP_CHECK_PERIOD": 1,
        }
        words: list[Any] = []
        for key, value in own.items():
            words += [key, value]
        cfg.merge_from_list([*words, *options])
        return self._made_with(cfg)

    def build_trial(self, folder: Path) -> Any:
        """A new trainer as with ``--fast-dev-run``, with the newest checkpoint of the folder, if there is one."""
        cfg = self.cfg.clone()
        cfg.merge_from_list(self._options_of_trial(str(folder)))
        return self._made_with(fast_dev_config(cfg), resume=True)

    def _made_with(self, cfg: Any, resume: bool = False) -> Any:
        seed_all_rng(cfg.SEED)
        trainer_class = self.trainer.__class__  # type() would be that of a weak reference
        trainer = trainer_class(cfg)
        trainer.resume_or_load(resume=resume)
        return trainer

    def _options_of_trial(self, folder: str) -> list[str]:
        options = ["OUTPUT_DIR", folder]
        options += ["SEED", f"{max(self.cfg.SEED, 0)}"]
        options += ["LOG.WRITERS", "['json']"]
        options += ["CHECKPOINT.MAX_TO_KEEP", "2"]
        return options

    @staticmethod
    def make(trainer: Any, steps: int, end: type[Until] = Until) -> Any:
        """Train some steps, fewer if the run is shorter, without an evaluation; returns the hook that ends them."""
        steps = min(steps, trainer.max_iter)
        until = end(steps)
        trainer.register_hooks([until])
        trainer.train(0, steps + 1)  # it is stopped before, so it does not finish
        return until

    def make_steps(self) -> None:
        """``ordinary``: a trainer after `STEPS` steps; ``sec``: of a step's parts; ``batches``: 8, on the device."""
        self.ordinary = self.build()
        self.ordinary.register_hooks([self.watcher])
        self.make(self.ordinary, STEPS)
        num_odd_steps = self.ordinary.iter // 2
        self.sec = {part: sec / num_odd_steps for part, sec in self.watcher.sec.items()}
        trainer = self.build()
        self.batches = [trainer.fetch() for _ in range(8)]

    def num_of_first_pass(self, most: int) -> int:
        """How many of the first batches are of the first pass over TRAIN, where no sample is twice."""
        if not self.trainer.has_epochs:
            return most
        return min(most, int(self.trainer.epoch_length))

    def largest_batch(self, times: float) -> str:
        """The largest size of a batch in words; ``times`` the present one fits for sure."""
        now = self.cfg.SOLVER.IMS_PER_BATCH
        size = max(now, int(now // comm.get_world_size() * times))
        # memory of the machine that runs out ends other programs, and ranks would have to agree
        if not accelerator_runs_ahead() or comm.get_world_size() > 1:
            return f"at least {size}"
        of_epoch = round(now * self.trainer.epoch_length) if self.trainer.has_epochs else size

        def make_steps(size: int) -> None:
            self.make(self.build("SOLVER.IMS_PER_BATCH", size), 2)

        def fits(size: int) -> bool:
            return has_room(lambda: make_steps(size))

        return str(search(fits, min(size, of_epoch), lambda: of_epoch))

    def start(self, name: str) -> Path:
        """The folder of six steps of the user's command, in a new process; it saves after the third and the last."""
        options = self._options_of_trial(f"{self.folder}/{name}")
        done = self.run(*self.command, "--fast-dev-run", *options)
        if done.returncode != 0:
            text = "with --fast-dev-run the command ends with"
            raise RuntimeError(f"{text} {done.returncode}: {done.stderr[-200:]}")
        return Path(self.folder, name, "fast_dev_run")

    def run(self, *words: str) -> Any:
        """A new process, which is no rank of this job."""
        environ = {}
        for key, value in os.environ.items():
            if not key.startswith(_OF_RANKS):
                environ[key] = value
        done = None
        if comm.is_main_process():
            done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
        return comm.broadcast(done)


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor of no subclass, such as those of sharding, which have no address."""
    return type(value) in (Tensor, nn.Parameter)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def digest(value: Any) -> str:
    """Of all leaves of nested containers."""
    found = hashlib.sha256()
    for leaf in tree_leaves(value):
        found.update(_bytes_of(leaf) if isinstance(leaf, Tensor) else pickle.dumps(leaf))
    return found.hexdigest()


def _bytes_of(tensor: Any) -> Any:
    if hasattr(tensor, "to_local"):  # it is sharded
        tensor = tensor.to_local()
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return values.view(torch.uint8).numpy()  # NumPy has no bfloat16
