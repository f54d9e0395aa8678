"""The parts of the default trainer, each built by a method that a subclass may override."""

import inspect
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trainkit.config import CfgNode, ConfigError
from trainkit.config.projects import scale_to_ranks, wrap_loader
from trainkit.data.build import build_test_loader, build_train_loader
from trainkit.data.catalog import DatasetCatalog
from trainkit.data.common import first_batches
from trainkit.engine.hook_base import HookBase
from trainkit.engine.hook_list import overrides
from trainkit.evaluation import (
    DatasetEvaluator,
    build_evaluator,
    inference_on_dataset,
    print_csv_format,
)
from trainkit.evaluation.observer import for_details, say_results_of
from trainkit.modeling import build_model
from trainkit.solver import build_lr_scheduler, build_optimizer
from trainkit.utils import comm

logger = logging.getLogger(__name__)


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
    def build_evaluator(
        cls, cfg: CfgNode, dataset_name: str
    ) -> DatasetEvaluator | list[DatasetEvaluator]:
        """The evaluators of TEST.EVALUATORS.

        Raises:
            NotImplementedError: TEST.EVALUATORS is empty.
        """
        if not cfg.TEST.EVALUATORS:
            raise NotImplementedError(
                "name evaluators in TEST.EVALUATORS, or override build_evaluator()"
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
        """
        names = cfg.DATASETS.TEST
        if isinstance(evaluators, DatasetEvaluator):
            evaluators = [evaluators]
        if evaluators is not None and len(evaluators) != len(names):
            raise ValueError(f"need one evaluator per dataset in {names}, got {len(evaluators)}")
        results: dict[str, Any] = {}
        for i, name in enumerate(names):
            evaluator: Any
            if evaluators is not None:
                evaluator = evaluators[i]
            else:
                try:
                    evaluator = cls.build_evaluator(cfg, name)
                except NotImplementedError as error:
                    logger.warning("%s is not evaluated: %s", name, error)
                    results[name] = {}
                    continue
            loader: Any = wrap_loader(cfg, cls.build_test_loader(cfg, name))
            if cfg.TEST.MAX_BATCHES:
                loader = first_batches(loader, cfg.TEST.MAX_BATCHES)
            results[name] = inference_on_dataset(model, loader, evaluator, name=name)
            if comm.is_main_process():
                logger.log(for_details(), "%s", say_results_of(name))
                print_csv_format(results[name])
        if len(results) == 1:
            (of_one_dataset,) = results.values()
            return of_one_dataset
        return results

    @classmethod
    def test_with_hooks(
        cls, cfg: CfgNode, model: nn.Module, hooks: Iterable[HookBase]
    ) -> dict[str, Any]:
        """The results of ``test(cfg, model)``, or of the ``evaluated_models`` of a hook.

        Every rank calls it.
        """
        offering = [hook for hook in hooks if overrides(hook, "evaluated_models")]
        if not offering:
            return cls.test(cfg, model)
        results: dict[str, Any] = {}
        for prefix, context in offering[0].evaluated_models(model).items():
            with context as evaluated:
                found = cls.test(cfg, evaluated)
            if prefix:
                results[prefix] = found
            else:
                results.update(found)
        return results

    @staticmethod
    def auto_scale_workers(cfg: CfgNode, num_workers: int) -> CfgNode:
        """The config for this number of ranks, as the projects in use scale it."""
        return scale_to_ranks(cfg, num_workers)

    @classmethod
    def is_default(cls, method: str) -> bool:
        """Whether no subclass overrides the method."""
        return inspect.getattr_static(cls, method) is vars(DefaultParts)[method]

    @classmethod
    def _check_names(cls, cfg: CfgNode) -> None:
        """Find wrong names now, not at the first evaluation.

        Names used only by overridden methods are not checked.
        """
        makes_loaders = cls.is_default("build_test_loader")
        makes_evaluators = cls.is_default("build_evaluator") and cfg.TEST.EVALUATORS
        for name in (*cfg.DATASETS.VAL, *cfg.DATASETS.TEST):
            if makes_loaders and name not in DatasetCatalog:
                key = "VAL" if name in cfg.DATASETS.VAL else "TEST"
                raise ConfigError(f"DATASETS.{key}: {DatasetCatalog.explain_unknown(name)}")
            if makes_evaluators:
                cls.build_evaluator(cfg, name)
