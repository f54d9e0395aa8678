"""The parts of the default trainer, each built by a method that a subclass may override."""

import inspect
import itertools
import logging
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from trainkit.config import CfgNode, ConfigError
from trainkit.config.imports import wrap_by_projects
from trainkit.data.build import build_test_loader, build_train_loader
from trainkit.data.catalog import DatasetCatalog
from trainkit.evaluation import DatasetEvaluator, build_evaluator, inference_on_dataset, print_csv_format
from trainkit.evaluation.observer import for_details
from trainkit.modeling import build_model
from trainkit.solver import build_lr_scheduler, build_optimizer
from trainkit.utils import comm
from trainkit.utils.plugins import NAMES, load_plugin

logger = logging.getLogger(__name__)

# test loaders that the current run keeps: dataset -> (config, loader)
kept_loaders: ContextVar[dict[str, tuple[CfgNode, Iterable[Any]]] | None] = ContextVar("kept_loaders", default=None)


class DefaultParts:
    """What `DefaultTrainer` builds, from the config alone; they work without a trainer."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """The model MODEL.NAME of the registry, on MODEL.DEVICE."""
        model = build_model(cfg)
        logger.debug("Model:\n%s", model)
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
        """The evaluators of TEST.EVALUATORS. Raises NotImplementedError if TEST.EVALUATORS is empty."""
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
            dataset -> results; for a single dataset, its results directly.

        Raises:
            ValueError: the numbers of evaluators and datasets differ.
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
            loader = _test_loader(cls.build_test_loader, cfg, name)
            if cfg.TEST.MAX_BATCHES:
                own: Any = getattr(loader, "first_batches", None)  # a loader may do this itself
                number = cfg.TEST.MAX_BATCHES
                loader = itertools.islice(loader, number) if own is None else own(number)
            results[name] = inference_on_dataset(model, loader, evaluator, name=name)
            if comm.is_main_process():
                logger.log(for_details(), "Results on %s:", name)
                print_csv_format(results[name])
        return next(iter(results.values())) if len(results) == 1 else results

    @staticmethod
    def auto_scale_workers(cfg: CfgNode, num_workers: int) -> CfgNode:
        """``cfg`` for another number of ranks than SOLVER.REFERENCE_WORLD_SIZE; see `trainkit.config.scale_workers`."""
        reference = cfg.SOLVER.get("REFERENCE_WORLD_SIZE")
        return load_plugin(NAMES["scale_workers"]).scale_workers(cfg, num_workers) if reference else cfg

    def _build(self, method: str, *args: Any) -> Any:
        built = getattr(self, method)(*args)
        if built is None:  # without this check, the error would come in code that is not the user's
            raise TypeError(f"{type(self).__name__}.{method}() returned None; return the object that it builds")
        return built

    @classmethod
    def is_default(cls, method: str) -> bool:
        """Whether no subclass overrides the method."""
        return inspect.getattr_static(cls, method) is vars(DefaultParts)[method]

    @classmethod
    def _check_names(cls, cfg: CfgNode) -> None:
        """Find wrong names now, not at the first evaluation. Names used only by overridden methods are not checked."""
        for key in ("VAL", "TEST"):
            for name in cfg.DATASETS[key]:
                if cls.is_default("build_test_loader") and name not in DatasetCatalog:
                    raise ConfigError(f"DATASETS.{key}: {DatasetCatalog.explain_unknown(name)}")
                if cls.is_default("build_evaluator") and cfg.TEST.EVALUATORS:
                    cls.build_evaluator(cfg, name)


def _test_loader(build: Callable[[CfgNode, str], Iterable[Any]], cfg: CfgNode, name: str) -> Iterable[Any]:
    """A new loader, or the loader of the last evaluation of this run if it keeps its workers."""
    kept = kept_loaders.get()
    if kept is not None and name in kept and kept[name][0] == cfg:
        return kept[name][1]
    loader = wrap_by_projects("wrap_loader", cfg, build(cfg, name))
    if kept is not None and getattr(loader, "persistent_workers", False):
        kept[name] = cfg, loader
    return loader
