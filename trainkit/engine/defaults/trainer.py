"""The default trainer, which is built from a config."""

import contextlib
import json
import logging
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint import FORMAT_REGISTRY, Checkpointer
from trainkit.checkpoint.atomic import write_text
from trainkit.checkpoint.errors import loading
from trainkit.checkpoint.folder import read_finished
from trainkit.config import (
    CfgNode,
    ConfigError,
    check_values,
    import_modules,
    prepare_projects,
    resolve_lengths,
)
from trainkit.config.lengths import check_lengths_go_on
from trainkit.config.projects import wrap_loader, wrap_model
from trainkit.engine import hooks
from trainkit.engine.data_size import DataSize
from trainkit.engine.defaults.build import (
    TRAINER_REGISTRY,
    ModelBuilder,
    build_parallel,
    ddp_options,
    make_step_trainer,
)
from trainkit.engine.defaults.folders import (
    checkpoint_dir,
    release_folders,
    use_folders,
    use_local_folders,
)
from trainkit.engine.defaults.hooks import ConfiguredHooks
from trainkit.engine.defaults.monitored import check_monitored_metrics
from trainkit.engine.defaults.parts import DefaultParts
from trainkit.engine.defaults.setup import default_writers, set_num_threads
from trainkit.engine.hook_base import HookBase
from trainkit.engine.hook_list import own_sort_key
from trainkit.engine.hooks.checkpoint import best_file_prefixes
from trainkit.engine.launch import is_restarted
from trainkit.engine.loop import TrainerBase
from trainkit.engine.parallel import create_ddp_model
from trainkit.engine.step import SimpleTrainer
from trainkit.evaluation import verify_results
from trainkit.evaluation.testing import result_as_float
from trainkit.modeling.build import choose_device, device_of_config, on_device
from trainkit.utils import comm
from trainkit.utils.device import is_part_of
from trainkit.utils.errors import look_up
from trainkit.utils.events import EventStorage, EventWriter
from trainkit.utils.logger import LINE_WIDTH, break_line
from trainkit.utils.periods import check_number, say_done
from trainkit.utils.plugins import find_plugins, load
from trainkit.utils.run_folder import LOCK_FILE

logger = logging.getLogger(__name__)

# files of a run that are not for people, and periodic checkpoints
_NOT_SHOWN = re.compile(
    r"model_\d+\..*|last_checkpoint|run_id|finished|slurm_job|events\..+|.+\.cut_\d+|previous_\d+"
)


class _OfStepTrainer:
    """An attribute that is read from the trainer of the steps.

    A property would forbid a subclass an attribute of its own with such a name; this does not.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:  # it is read from the class
            return self
        return getattr(trainer._step_trainer, self._name)


class DefaultTrainer(DefaultParts, TrainerBase):
    """A standard job from a config: model, optimizer, data, checkpoints, evaluation, logs.

    To change a part, override its method in a subclass (``build_model``, ``build_hooks``, ...). If
    your job is too different, use `SimpleTrainer`, or write a loop as in
    ``tools/plain_train_net.py``.

    ::

        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load()  # the last checkpoint, or else MODEL.WEIGHTS
        trainer.train()

    Attributes:
        cfg: the config with every length in iterations.
        given_cfg: the config as it was given.
        scheduler, checkpointer: those of the run.
    """

    own_keys = (*TrainerBase.own_keys, "data", "results")
    _has_loaded = False  # a state since the last ``train()``

    # read from the trainer of the steps; the last section has those that can be set too
    batch = _OfStepTrainer()
    losses = _OfStepTrainer()
    trained_losses = _OfStepTrainer()
    outputs = _OfStepTrainer()
    feed = _OfStepTrainer()
    fetch = _OfStepTrainer()
    reset_data_loader = _OfStepTrainer()
    metrics = _OfStepTrainer()
    policy = _OfStepTrainer()
    grad_scaler = _OfStepTrainer()
    precision = _OfStepTrainer()
    skipped_updates = _OfStepTrainer()

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__()
        check_values(cfg)
        import_modules(cfg.IMPORTS)
        use_local_folders(cfg)
        choose_device(cfg)
        self.given_cfg = cfg
        self._loaded_size = DataSize()
        cfg = prepare_projects(cfg)
        self._check_names(cfg)
        cfg = self.auto_scale_workers(cfg, comm.get_data_world_size())

        def build(cfg: CfgNode) -> nn.Module:
            model = on_device(cfg, self.build_model(cfg))
            return wrap_model(cfg, model)

        device_of_config(cfg)  # so that "cuda" in a build method means this device
        # in this order: users' build_optimizer may need the model, and their build_train_loader
        # both
        model = build_parallel(cfg, ModelBuilder(build, self))
        optimizer = self.build_optimizer(cfg, model)
        data_loader = wrap_loader(cfg, self.build_train_loader(cfg))
        if cfg.MODEL.PARALLEL == "ddp":
            model = create_ddp_model(model, **ddp_options(cfg))
        make_trainer = make_step_trainer
        if cfg.SOLVER.TRAINER:
            make_trainer = look_up(TRAINER_REGISTRY, cfg.SOLVER.TRAINER, "SOLVER.TRAINER")
        self._trainer = make_trainer(cfg, model, data_loader, optimizer)

        # from here on every length is in iterations
        self._cfg_with_epochs = cfg
        cfg = resolve_lengths(cfg, self._epoch_length_or_none())
        self.cfg = cfg
        if cfg.LOG.GATHER_PERIOD == 1:
            self._trainer.metrics.exchange_period = cfg.LOG.PERIOD
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = self._build_checkpointer(model)
        self.stop_check_period = cfg.STOP_CHECK_PERIOD
        self.history_length = cfg.LOG.HISTORY_LENGTH
        self.storage = EventStorage(history_length=self.history_length)
        self.max_iter = cfg.SOLVER.MAX_ITER
        self.register_hooks(self.build_hooks())
        self._register_hooks_of_projects()
        self._configured.check_taken()

    def _epoch_length_or_none(self) -> Any:
        return self.epoch_length if self.has_epochs else None

    def _build_checkpointer(self, model: nn.Module) -> Checkpointer:
        name = self.cfg.CHECKPOINT.FORMAT or ""
        if name:
            look_up(FORMAT_REGISTRY, name, "CHECKPOINT.FORMAT")
        me = weakref.proxy(self)
        return Checkpointer(model, checkpoint_dir(self.cfg), format=name, trainer=me)

    def _register_hooks_of_projects(self) -> None:
        """The classes of RUN_HOOKS in plug-ins, unless ``build_hooks`` has made one."""
        for name in find_plugins().run_hooks:
            hook_class = load(name)
            is_there = any(isinstance(hook, hook_class) for hook in self.hooks)
            is_wanted = not is_there and hook_class.is_needed(self)
            self.register_hooks(self._configured.take(hook_class, default=is_wanted))

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.cfg.OUTPUT_DIR})"

    # ------------------------------------------------------------------ running

    def resume_or_load(self, resume: bool = True) -> None:
        """Load the last checkpoint in OUTPUT_DIR if ``resume`` and there is one.

        Else load MODEL.WEIGHTS. A run that torchrun has restarted always resumes.

        Raises:
            ConfigError: the checkpoint is beyond SOLVER.MAX_ITER, or the epochs of the run have
                another length now; and as `Checkpointer.resume_or_load`.
        """
        resume = resume or is_restarted()
        self.checkpointer.resume_or_load(self.cfg.MODEL.WEIGHTS, resume=resume)
        if not self.checkpointer.resumed_from:
            return
        self.start_iter = self.iter + 1  # the checkpoint names the last completed iteration
        old_epoch = self._loaded_size.epoch
        new_epoch = self._trainer.data_size.epoch
        if old_epoch is not None and new_epoch is not None and old_epoch != new_epoch:
            check_lengths_go_on(self._cfg_with_epochs, self.start_iter, old_epoch, new_epoch)
        if self.start_iter > self.max_iter:
            raise ConfigError(
                f"SOLVER.MAX_ITER is {self.max_iter}, but the checkpoint to resume from has done "
                f"{self.start_iter} iterations; raise it, or leave out --resume"
            )
        self._resume_finished_run()

    def _resume_finished_run(self) -> None:
        """If the run has finished with the loaded checkpoint, have its status and results."""
        is_final_file = self.checkpointer.resumed_from.endswith("_final.pth")
        if self.cfg.CHECKPOINT.SAVE_LAST and not is_final_file:
            return  # the final file is damaged, or an earlier one was chosen
        finished: Any = None
        if comm.is_main_process():
            finished = read_finished(checkpoint_dir(self.cfg))
        finished = comm.broadcast(finished)
        if self._is_end_of_this_run(finished):
            self.status = "finished"
            self.iter = self.start_iter
            self._last_eval_results = finished["results"]

    def _is_end_of_this_run(self, finished: Any) -> bool:
        """Whether the content of the file ``finished`` says that nothing is left to do."""
        if not isinstance(finished, dict) or finished.get("iterations") != self.start_iter:
            return False
        end = finished.get("max_iter")
        has_results = isinstance(finished.get("results"), dict)
        return isinstance(end, int) and has_results and self.max_iter <= end

    # another signature: the arguments have defaults here, and results are returned
    def train(  # type: ignore[override]
        self, start_iter: int | None = None, max_iter: int | None = None
    ) -> dict[str, Any]:
        """Train from the current position, or ``start_iter``, to ``max_iter``.

        Without ``max_iter`` it ends where the last ``train()`` was to end, at first at
        SOLVER.MAX_ITER. `resume_or_load` sets the position. If a run was stopped or failed in this
        process, training continues with the next iteration. A finished run is not started again.
        What another trainer of this process has written to the folders is moved to
        ``previous_<n>`` there, unless this one has loaded a state to go on from.

        Returns:
            The results of the last evaluation, on rank 0.

        Raises:
            ConfigError: another run writes to OUTPUT_DIR or CHECKPOINT.DIR, also one of this
                process; a hook follows a metric that cannot come.
            SystemExit: with code 1 if the results differ from TEST.EXPECTED_RESULTS.
            OSError: the run is at its end, but not all of its results are on the disk.
        """
        saved_model = getattr(self.checkpointer, "model", self.model)
        if not is_part_of(self.model, saved_model):
            raise ValueError(
                "trainer.model is not the one that the checkpointer saves; return it in build_model"
            )
        is_given = start_iter is not None or max_iter is not None
        if self.status == "finished" and not is_given and self._has_nothing_to_do():
            logger.warning(
                "This run has finished after %d iterations, so nothing is done; to train on, "
                "raise SOLVER.MAX_ITER, or call train(max_iter=...)",
                self.iter,
            )
            release_folders(self.cfg)  # default_setup has locked them
            return self._results
        if start_iter is None:
            start_iter = self.start_iter if self.status == "not started" else self.next_iter
        if max_iter is None:
            max_iter = self.max_iter
        if max_iter > self.cfg.SOLVER.MAX_ITER and self.is_default("build_lr_scheduler"):
            logger.warning(
                "train(max_iter=%d) goes on after the end of the schedule, which SOLVER.MAX_ITER "
                "gives (%d): the learning rate stays as it is there, maybe 0. For the schedule of "
                "the longer run, make a trainer with this SOLVER.MAX_ITER and resume",
                max_iter,
                self.cfg.SOLVER.MAX_ITER,
            )
        if start_iter == 0 and self.cfg.MODEL.WEIGHTS and not self.checkpointer.has_loaded:
            logger.warning(
                "MODEL.WEIGHTS %r is not loaded; call trainer.resume_or_load(resume=False) before "
                "trainer.train()",
                self.cfg.MODEL.WEIGHTS,
            )
        check_monitored_metrics(self)
        with self._using_folders(start_iter):
            self._mark_finished(None)
            super().train(start_iter, max_iter)
            if self.status == "finished":
                self._mark_finished(max_iter)
        if self.status == "finished" and self.cfg.TEST.EXPECTED_RESULTS and comm.is_main_process():
            verify_results(self.cfg, self._results)
        return self._results

    @contextlib.contextmanager
    def _using_folders(self, start_iter: int) -> Iterator[None]:
        """Context in which this run owns its folders; at the end the log has a summary."""
        starts_over = start_iter == 0 and self.done > 0
        has_loaded = self._has_loaded
        self._has_loaded = False
        notes = use_folders(self.cfg, self, starts_over=starts_over, has_loaded=has_loaded)
        try:
            for note in notes:
                logger.info(note)
            yield
        except OSError:
            self.status = "failed"
            raise
        finally:
            if comm.is_main_process() and self.status not in ("not started", "running"):
                logger.info("%s", self._summary())
            release_folders(self.cfg, after_use=True)

    def _mark_finished(self, max_iter: int | None) -> None:
        """Write the file by which a later run knows that this one has finished; None: remove it."""
        if not comm.is_main_process():
            return
        mark = Path(checkpoint_dir(self.cfg), "finished")
        if max_iter is None:
            mark.unlink(missing_ok=True)
            return
        results = _plain_results(self._results)
        content = {"iterations": self.iter, "max_iter": max_iter, "results": results}
        write_text(json.dumps(content), mark)

    def _has_nothing_to_do(self) -> bool:
        return self.next_iter >= self.max_iter or self._stays_finished(self.max_iter)

    def _summary(self) -> str:
        """The end of the run: progress, the ``summary()`` of each hook, files.

        Periodic checkpoints, and files that no person reads, are left out.
        """
        verb = "was" if self.status == "stopped" else "has"
        max_iter = self.max_iter
        reason = ""
        if self._early is not None:
            max_iter = self._early.max_iter
            reason = f", early: {self._early.reason}"
        lines = [f"The run {verb} {self.status} {say_done(self.done, max_iter)}{reason}"]
        for hook in self.hooks:
            line = hook.summary()
            if line:
                lines.append(line)
        names = []
        for path in sorted(Path(self.cfg.OUTPUT_DIR).glob("[!.]*")):
            if path.name != LOCK_FILE and not _NOT_SHOWN.fullmatch(path.name):
                names.append(path.name)
        files = f"files in {self.cfg.OUTPUT_DIR}: {', '.join(names)}"
        lines.append(break_line(files, LINE_WIDTH - 2).replace("\n", "\n  "))
        if self.status != "finished" and self.checkpointer.has_checkpoint():
            when = "to go on" if self.status == "stopped" else "when the cause is mended"
            lines.append(f"{when}: the same command with --resume, or trainer.train()")
        return "\n  ".join(lines)

    def run_step(self) -> None:
        trainer = self._step_trainer
        trainer.iter = self.iter
        trainer.max_iter = self.max_iter
        trainer.storage = self.storage
        trainer.run_step()

    def _check_first_iteration(self) -> None:
        super()._check_first_iteration()
        has_own_step = type(self).run_step is not DefaultTrainer.run_step
        if has_own_step and self._step_trainer.made_no_step:
            self._warn_of_own_step()

    def _warn_of_own_step(self) -> None:
        """Warn of settings that a ``run_step`` which replaces the whole step may not obey."""
        step = f"{type(self).__name__}.run_step"
        solver = self.cfg.SOLVER
        ignored = []
        if solver.AMP.ENABLED:
            ignored.append("SOLVER.AMP.ENABLED")
        if solver.NON_FINITE.POLICY != "raise":
            ignored.append("SOLVER.NON_FINITE.POLICY")
        if ignored:
            logger.warning(
                "%s replaces the whole step; unless it reads them, these settings have no effect: %s",
                step,
                ", ".join(ignored),
            )
        drawn = self._trainer.feed.drawn
        if drawn not in (0, solver.ACCUMULATION_STEPS):
            logger.warning(
                "%s has drawn %d batches, and SOLVER.ACCUMULATION_STEPS is %d: set it to %d, or "
                "epochs are counted wrongly",
                step,
                drawn,
                solver.ACCUMULATION_STEPS,
                drawn,
            )

    def saved_objects(self) -> Sequence[Any]:
        return [*super().saved_objects(), *self._trainer.saved_objects()]

    def parameter_names(self) -> dict[str, Tensor]:
        return {**self._trainer.parameter_names(), **super().parameter_names()}

    def describe_inexact(self) -> list[str]:
        return [*super().describe_inexact(), *self._trainer.describe_inexact()]

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "data": self._trainer.feed.state_dict(),
            "data_size": self._trainer.data_size.state_dict(),
            "results": _plain_results(self._results),
            "num_threads": torch.get_num_threads(),
            "_trainer": {
                **self._trainer.step_state_dict(),
                **self._trainer._attributes.state_dict(),
            },
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().check_state_dict(state_dict)
        of_step = state_dict.get("_trainer", {})
        self._trainer._attributes.check(of_step)
        self._trainer.check_step_state_dict(of_step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._has_loaded = self.status != "running"
        # the results of an earlier run of this trainer
        self.__dict__.pop("_last_eval_results", None)
        results = state_dict.get("results")
        if results:
            self._last_eval_results = results
        if self._has_loaded:
            self._take_over_threads(state_dict.get("num_threads"))
        with loading("the position in the data"):
            self._loaded_size = DataSize.from_state(state_dict.get("data_size", {}))
            self._trainer.compare_data(state_dict)
            self._trainer.feed.load_state_dict(state_dict.get("data", {}))
        self._trainer._attributes.load_state_dict(state_dict["_trainer"])
        self._trainer.load_step_state_dict(state_dict["_trainer"])

    def _take_over_threads(self, saved: Any) -> None:
        """With another number of threads, torch adds numbers in another order."""
        own = torch.get_num_threads()
        if saved is None or saved == own:  # files of detectron2 do not say it
            return
        check_number("num_threads", saved, "[1, 1024]")
        if self.cfg.NUM_THREADS == 0:
            set_num_threads(saved)
            logger.info("torch uses %d threads, as in the checkpoint; here it had %d", saved, own)
        else:
            logger.warning(
                "By NUM_THREADS torch uses %d threads; in the checkpoint's run it used %d: the last "
                "bits may differ",
                own,
                saved,
            )

    # ------------------------------------------------------------------ hooks

    def build_hooks(self) -> list[HookBase | None]:
        """The default hooks and those of HOOKS, in the order of their priorities."""
        cfg = self.cfg
        take = self._configured.take
        me = weakref.proxy(self)  # a strong reference would keep the trainer alive

        def evaluate() -> dict[str, Any]:
            results: dict[str, Any] = me._evaluate(me.cfg.DATASETS.VAL or me.cfg.DATASETS.TEST)
            return results

        def evaluate_at_end() -> dict[str, Any]:
            return {"test": me._evaluate(me.cfg.DATASETS.TEST)}  # those of VAL have no prefix

        built: list[HookBase] = []
        # first: the time of a step must not include the after_step of other hooks
        built += take(hooks.IterationTimer)
        # early: checkpoint and evaluation must already have the next learning rate, as they do
        # after a resume
        built += take(hooks.LRScheduler, priority=45)

        # These stand after most other hooks, so that the checkpointer saves the state that the
        # others have after this iteration.
        late: list[HookBase] = []
        # before the evaluation: if it fails, there is a checkpoint to debug it
        late += take(hooks.PeriodicCheckpointer, checkpointer=self.checkpointer)
        late += take(hooks.EvalHook, eval_function=evaluate, logs_last=False)
        # after the evaluation: they need its results
        late += take(hooks.BestCheckpointer, default=False)
        for metric, prefix in best_file_prefixes(cfg.CHECKPOINT.BEST_METRIC).items():
            late += take(hooks.BestCheckpointer, val_metric=metric, file_prefix=prefix)
        late += take(hooks.EarlyStopping, default=bool(cfg.EARLY_STOPPING.METRIC))
        # after all hooks that choose a checkpoint: the test data must not influence them
        late += take(
            hooks.FinalEvalHook,
            default=bool(cfg.DATASETS.VAL),
            eval_function=evaluate_at_end,
            logs_last=False,
        )
        # last: it writes the values of all other hooks
        writers = self.build_writers() if comm.is_main_process() else []
        late += take(hooks.PeriodicWriter, writers=writers)

        built += self._configured.rest()  # those that have no place above
        built += late
        return [*sorted(built, key=own_sort_key)]

    def build_writers(self) -> list[EventWriter]:
        """The writers of LOG.WRITERS; called on rank 0."""
        return default_writers(
            self.cfg.OUTPUT_DIR,
            self.max_iter,
            self.cfg.LOG.WRITERS,
            self.cfg.LOG.WINDOW,
            self._epoch_length_or_none(),
            cfg=self.cfg,
        )

    @cached_property
    def _configured(self) -> ConfiguredHooks:
        return ConfiguredHooks(self.cfg.HOOKS, weakref.proxy(self))

    @property
    def _results(self) -> dict[str, Any]:
        """The results of the last evaluation.

        detectron2 users check whether ``_last_eval_results`` exists.
        """
        return getattr(self, "_last_eval_results", {})

    def _evaluate(self, datasets: Sequence[str]) -> dict[str, Any]:
        cfg = self.cfg.clone()
        cfg.defrost()
        cfg.DATASETS.TEST = datasets
        self._last_eval_results = self.test_with_hooks(cfg, self.model, self.hooks)
        return self._last_eval_results

    # ------------------------------------------------------------------ the trainer of the steps

    @property
    def _trainer(self) -> Any:
        """The trainer of the steps, as in detectron2; can be replaced."""
        return self._step_trainer

    @_trainer.setter
    def _trainer(self, trainer: Any) -> None:
        self._step_trainer: SimpleTrainer = trainer
        trainer.share_run(self)  # it gets the hooks and the storage of this one

    @property
    def _inner(self) -> SimpleTrainer:
        return self._step_trainer

    @property
    def model(self) -> Any:
        return self._step_trainer.model

    @model.setter
    def model(self, value: Any) -> None:
        self._step_trainer.model = value

    @property
    def optimizer(self) -> Any:
        return self._step_trainer.optimizer

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self._step_trainer.optimizer = value

    @property
    def data_loader(self) -> Any:
        return self._step_trainer.data_loader

    @data_loader.setter
    def data_loader(self, value: Any) -> None:
        self._step_trainer.data_loader = value

    @property
    def accumulation_steps(self) -> Any:
        return self._step_trainer.accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, value: Any) -> None:
        self._step_trainer.accumulation_steps = value

    @property
    def iters_per_epoch(self) -> Any:
        return self._step_trainer.iters_per_epoch

    @property
    def epoch_length(self) -> Any:
        return self._step_trainer.epoch_length

    @property
    def clip_gradients(self) -> Any:
        return self._step_trainer.clip_gradients

    @clip_gradients.setter
    def clip_gradients(self, value: Any) -> None:
        self._step_trainer.clip_gradients = value


def _plain_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """Nested results as Python numbers."""
    plain: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            plain[str(name)] = _plain_results(value)
        else:
            plain[str(name)] = result_as_float(str(name), value)
    return plain
