"""What most people start with: a trainer that is assembled from a config."""

import inspect
import itertools
import logging
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.checkpoint import Checkpointer
from trainkit.config import CfgNode, ConfigError, check_values, import_modules, resolve_lengths, scale_workers
from trainkit.data.build import build_test_loader, build_train_loader
from trainkit.data.catalog import DatasetCatalog
from trainkit.engine import hooks
from trainkit.engine.parallel import create_ddp_model
from trainkit.engine.predictor import DefaultPredictor
from trainkit.engine.setup import default_argument_parser, default_setup, default_writers
from trainkit.engine.train_loop import HookBase, TrainerBase
from trainkit.engine.trainers import AMPTrainer, SimpleTrainer
from trainkit.evaluation import (
    DatasetEvaluator,
    build_evaluator,
    inference_on_dataset,
    print_csv_format,
    verify_results,
)
from trainkit.modeling import build_model
from trainkit.solver import build_gradient_clipper, build_lr_scheduler, build_optimizer
from trainkit.utils import comm
from trainkit.utils.device import device_of
from trainkit.utils.events import EventWriter

logger = logging.getLogger(__name__)

# also those that detectron2's users import from here
__all__ = [
    "DefaultPredictor",
    "DefaultTrainer",
    "create_ddp_model",
    "default_argument_parser",
    "default_setup",
    "default_writers",
]


class DefaultTrainer(TrainerBase):
    """A standard job from a config: model, optimizer, schedule, data, checkpoints, evaluation, logs.

    It assembles and decides nothing else. What does not fit is changed in a subclass, method by method
    (``build_model``, ``build_hooks``, ...); what does not fit at all is better written with `SimpleTrainer`, or
    as a loop of its own as in ``tools/plain_train_net.py``.

    ::

        trainer = DefaultTrainer(cfg)
        trainer.resume_or_load()  # the last checkpoint, or else MODEL.WEIGHTS
        trainer.train()

    Attributes:
        cfg: the config with every length in iterations.
        scheduler, checkpointer: as built.
    """

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__()
        import_modules(cfg.IMPORTS)
        check_values(cfg)
        self._check_names(cfg)
        cfg = self.auto_scale_workers(cfg, comm.get_world_size())

        # in this order: users' build methods count on the model being there for the optimizer, both for the loader
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        data_loader = self.build_train_loader(cfg)
        model = create_ddp_model(model, broadcast_buffers=False)
        self._trainer = self._build_step_trainer(cfg, model, data_loader, optimizer)

        self.cfg = cfg = self._resolve_lengths(cfg)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, trainer=weakref.proxy(self))
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER
        self._results: dict[str, Any] = {}
        self.register_hooks(self.build_hooks())

    # ------------------------------------------------------------------ running

    def resume_or_load(self, resume: bool = True) -> None:
        """Go on from the last checkpoint in OUTPUT_DIR if ``resume`` and there is one; else load MODEL.WEIGHTS.

        Raises:
            trainkit.checkpoint.CheckpointError: no checkpoint is intact, or it is of another model.
            ConfigError: the checkpoint is beyond SOLVER.MAX_ITER.
        """
        self.checkpointer.resume_or_load(self.cfg.MODEL.WEIGHTS, resume=resume)
        if resume and self.checkpointer.has_checkpoint():
            self.start_iter = self.iter + 1  # the checkpoint names the last iteration done
            if self.start_iter > self.max_iter:
                raise ConfigError(
                    f"SOLVER.MAX_ITER is {self.max_iter}, but the checkpoint to resume from has done {self.start_iter} "
                    "iterations; raise it, or leave out --resume"
                )

    def train(  # type: ignore[override]  # the arguments have defaults here, and evaluation has results
        self, start_iter: int | None = None, max_iter: int | None = None
    ) -> dict[str, Any]:
        """Run from where the run stands (see ``resume_or_load``), or from ``start_iter``, to SOLVER.MAX_ITER.

        A run that was stopped or failed in this process goes on with the iteration that it had not done; one that has
        finished is not begun again.

        Returns:
            The results of the last evaluation, on rank 0.

        Raises:
            SystemExit: with code 1 if they differ from TEST.EXPECTED_RESULTS.
        """
        if start_iter is None:
            start_iter = self.start_iter if self.status == "not started" else self._last_done_iter + 1
            if self.status == "finished" and max_iter is None:
                logger.warning("This run has finished after %d iterations; give train() a larger max_iter", self.iter)
                return self._results
        self.warn_unclaimed_states()
        super().train(start_iter, self.max_iter if max_iter is None else max_iter)
        if comm.is_main_process():
            files = sorted(path.name for path in Path(self.cfg.OUTPUT_DIR).glob("*") if path.is_file())
            logger.info("Files in %s: %s", self.cfg.OUTPUT_DIR, ", ".join(files))
            if self.cfg.TEST.EXPECTED_RESULTS and self.status == "finished":
                verify_results(self.cfg, self._results)
        return self._results

    def run_step(self) -> None:
        self._trainer.iter, self._trainer.max_iter = self.iter, self.max_iter
        self._trainer.run_step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "_trainer": self._trainer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._trainer.load_state_dict(state_dict["_trainer"])

    # ------------------------------------------------------------------ hooks

    def build_hooks(self) -> list[HookBase | None]:
        """The hooks in their fixed order; what is registered later comes before the writers."""
        cfg = self.cfg
        period, best, early = cfg.TEST.EVAL_PERIOD, cfg.CHECKPOINT, cfg.EARLY_STOPPING
        me = weakref.proxy(self)  # a hook that held its trainer would keep it alive
        return [
            # first: the time of a step is measured without the hooks behind it
            hooks.IterationTimer(),
            # early: what is saved and evaluated below belongs to the next learning rate, as after a resume
            hooks.LRScheduler(),
            # before the checkpointer: the statistics are part of what is saved and evaluated
            self._build_precise_bn(),
            # before the evaluation: if that fails, the checkpoint is there to find out why
            hooks.PeriodicCheckpointer(
                self.checkpointer, cfg.SOLVER.CHECKPOINT_PERIOD, max_to_keep=cfg.CHECKPOINT.MAX_TO_KEEP
            ),
            hooks.EvalHook(period, lambda: me._validate(), eval_at_start=cfg.TEST.EVAL_AT_START),
            # behind the evaluation, whose results they look at
            hooks.BestCheckpointer(period, self.checkpointer, best.BEST_METRIC, best.BEST_MODE)
            if best.BEST_METRIC
            else None,
            hooks.EarlyStopping(period, early.METRIC, early.MODE, early.PATIENCE, early.MIN_DELTA)
            if early.METRIC
            else None,
            # behind everything that could choose a checkpoint: the test data has no say in that
            hooks.EvalHook(0, lambda: me._test()) if cfg.DATASETS.VAL else None,
            # last: whatever the others put is written
            hooks.PeriodicWriter(self.build_writers() if comm.is_main_process() else [], cfg.LOG.PERIOD),
        ]

    def build_writers(self) -> list[EventWriter]:
        """Those of LOG.WRITERS; called on rank 0."""
        return default_writers(self.cfg.OUTPUT_DIR, self.max_iter, self.cfg.LOG.WRITERS, self.cfg.LOG.WINDOW)

    def _build_precise_bn(self) -> HookBase | None:
        options = self.cfg.TEST.PRECISE_BN
        if not options.ENABLED or not any(isinstance(m, _BatchNorm) and m.training for m in self.model.modules()):
            return None
        cfg = self.cfg.clone()
        cfg.defrost()
        cfg.DATALOADER.NUM_WORKERS = 0  # it is used rarely
        loader = self.build_train_loader(cfg)  # its own, so that the order of the training data stays as it is
        return hooks.PreciseBN(self.cfg.TEST.EVAL_PERIOD, self.model, loader, options.NUM_ITER)

    def _validate(self) -> dict[str, Any]:
        cfg = self.cfg
        if cfg.DATASETS.VAL:
            cfg = cfg.clone()
            cfg.defrost()
            cfg.DATASETS.TEST = cfg.DATASETS.VAL
        self._results = self.test(cfg, self.model)
        return self._results

    def _test(self) -> dict[str, Any]:
        self._results = self.test(self.cfg, self.model)
        return {"test": self._results}  # beside the results of the validation data, which have no prefix

    # ------------------------------------------------------------------ parts to override

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """MODEL.NAME of the registry, on MODEL.DEVICE."""
        model = build_model(cfg)
        logger.info("Model:\n%s", model)
        return model

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(cfg, model)

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: torch.optim.Optimizer) -> Any:
        return build_lr_scheduler(cfg, optimizer)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Iterable[Any]:
        return build_train_loader(cfg)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Iterable[Any]:
        return build_test_loader(cfg, dataset_name)

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator | list[DatasetEvaluator]:
        """Those of TEST.EVALUATORS.

        Raises:
            NotImplementedError: none is named there.
        """
        if not cfg.TEST.EVALUATORS:
            raise NotImplementedError(
                "name evaluators in TEST.EVALUATORS, or override DefaultTrainer.build_evaluator(cfg, dataset_name) to "
                "return a DatasetEvaluator"
            )
        return build_evaluator(cfg, dataset_name)

    @classmethod
    def test(
        cls,
        cfg: CfgNode,
        model: nn.Module,
        evaluators: DatasetEvaluator | list[DatasetEvaluator] | None = None,
    ) -> dict[str, Any]:
        """Evaluate ``model`` on each dataset of ``cfg.DATASETS.TEST``; log the results as tables.

        Args:
            evaluators: one per dataset, instead of those of ``build_evaluator``.

        Returns:
            The results by dataset; those of a single dataset directly.

        Raises:
            ValueError: there are not as many evaluators as datasets.
        """
        names = cfg.DATASETS.TEST
        if evaluators is not None:
            evaluators = [evaluators] if isinstance(evaluators, DatasetEvaluator) else list(evaluators)
            if len(evaluators) != len(names):
                raise ValueError(f"need one evaluator per dataset in {names}, got {len(evaluators)}")
        results: dict[str, Any] = {}
        for i, name in enumerate(names):
            if evaluators is not None:
                evaluator: Any = evaluators[i]
            else:
                try:
                    evaluator = cls.build_evaluator(cfg, name)
                except NotImplementedError as error:
                    logger.warning("%s is not evaluated: %s", name, error)
                    results[name] = {}
                    continue
            loader = cls.build_test_loader(cfg, name)
            if cfg.TEST.MAX_BATCHES:
                loader = itertools.islice(loader, cfg.TEST.MAX_BATCHES)
            results[name] = inference_on_dataset(model, loader, evaluator)
            if comm.is_main_process():
                logger.info("Results on %s:", name)
                print_csv_format(results[name])
        return next(iter(results.values())) if len(results) == 1 else results

    @staticmethod
    def auto_scale_workers(cfg: CfgNode, num_workers: int) -> CfgNode:
        """See `trainkit.config.scale_workers`."""
        return scale_workers(cfg, num_workers)

    # ------------------------------------------------------------------ the trainer of one step

    @staticmethod
    def _build_step_trainer(
        cfg: CfgNode, model: nn.Module, data_loader: Iterable[Any], optimizer: torch.optim.Optimizer
    ) -> SimpleTrainer:
        device = device_of(model)
        on_accelerator = device is not None and device.type != "cpu"
        clipper = build_gradient_clipper(cfg)
        if clipper is not None and getattr(optimizer, "gradient_clipper", None) == clipper:
            clipper = None  # maybe_add_gradient_clipping has attached it to the optimizer
        arguments: dict[str, Any] = {
            "gather_metric_period": cfg.LOG.GATHER_PERIOD,
            "zero_grad_before_forward": cfg.SOLVER.ZERO_GRAD_BEFORE_FORWARD,
            "async_write_metrics": on_accelerator if cfg.LOG.ASYNC is None else cfg.LOG.ASYNC,
            "accumulation_steps": cfg.SOLVER.ACCUMULATION_STEPS,
            "clip_gradients": clipper,
        }
        if not cfg.SOLVER.AMP.ENABLED:
            return SimpleTrainer(model, data_loader, optimizer, **arguments)
        precision = {"float16": torch.float16, "bfloat16": torch.bfloat16}[cfg.SOLVER.AMP.PRECISION]
        return AMPTrainer(model, data_loader, optimizer, precision=precision, **arguments)

    @classmethod
    def _check_names(cls, cfg: CfgNode) -> None:
        """Find a wrong name now rather than at the first evaluation; what is overridden is not called for that."""

        def is_default(method: str) -> bool:
            return inspect.getattr_static(cls, method) is vars(DefaultTrainer)[method]

        for key in ("VAL", "TEST"):
            for name in cfg.DATASETS[key]:
                if is_default("build_test_loader") and name not in DatasetCatalog:
                    raise ConfigError(f"DATASETS.{key}: {DatasetCatalog.explain_unknown(name)}")
                if is_default("build_evaluator") and cfg.TEST.EVALUATORS:
                    cls.build_evaluator(cfg, name)

    def _resolve_lengths(self, cfg: CfgNode) -> CfgNode:
        try:
            iters_per_epoch = self.iters_per_epoch
        except ValueError:  # a stream; whether that matters depends on the config
            iters_per_epoch = None
        return resolve_lengths(cfg, iters_per_epoch)

    @property
    def _trainer(self) -> SimpleTrainer:
        return self._step_trainer

    @_trainer.setter
    def _trainer(self, trainer: SimpleTrainer) -> None:
        """Its ``after_backward`` is ours: there is one list of hooks, and ours may be overridden."""
        self._step_trainer = trainer
        outer = weakref.proxy(self)
        trainer.register_hooks([hooks.CallbackHook(after_backward=lambda _: outer.after_backward())])

    @property
    def model(self) -> nn.Module:
        return self._trainer.model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._trainer.model = model

    @property
    def data_loader(self) -> Iterable[Any]:
        return self._trainer.data_loader

    @data_loader.setter
    def data_loader(self, data_loader: Iterable[Any]) -> None:
        self._trainer.data_loader = data_loader

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._trainer.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._trainer.optimizer = optimizer

    @property
    def batch(self) -> Any:
        """As `SimpleTrainer.batch`."""
        return self._trainer.batch

    @property
    def losses(self) -> Mapping[str, torch.Tensor]:
        """As `SimpleTrainer.losses`."""
        return self._trainer.losses

    @property
    def iters_per_epoch(self) -> int:
        """As `SimpleTrainer.iters_per_epoch`."""
        return self._trainer.iters_per_epoch

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self.iter // self.iters_per_epoch
