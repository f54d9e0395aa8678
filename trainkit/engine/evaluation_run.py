"""Evaluation without training (``--eval-only``)."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from trainkit.checkpoint import Checkpointer
from trainkit.config import CfgNode, ConfigError, check_values, import_modules, prepare_projects, resolve_lengths
from trainkit.engine.build import ModelBuilder, build_parallel
from trainkit.engine.folders import checkpoint_dir
from trainkit.engine.hook_base import EVALUATION_POINTS
from trainkit.engine.hook_list import overrides
from trainkit.engine.hooks import ConfiguredHooks, HookBase
from trainkit.engine.loop import TrainerBase
from trainkit.engine.setup import default_writers
from trainkit.evaluation import observe_inference, verify_results
from trainkit.modeling import on_device
from trainkit.utils import comm
from trainkit.utils.events import EventStorage


def evaluate_models(
    test: Callable[[CfgNode, nn.Module], dict[str, Any]], cfg: CfgNode, model: nn.Module, hooks: Iterable[HookBase]
) -> dict[str, Any]:
    """The results of ``test(cfg, model)``, or of the ``evaluated_models`` of a hook; every rank calls it."""
    offering = next((hook for hook in hooks if overrides(hook, "evaluated_models")), None)
    if offering is None:
        return test(cfg, model)
    results: dict[str, Any] = {}
    for prefix, context in offering.evaluated_models(model).items():
        with context as evaluated:
            found = test(cfg, evaluated)
        results |= {prefix: found} if prefix else found
    return results


class EvaluationRun(TrainerBase):
    """Load MODEL.WEIGHTS, or else the last checkpoint of the run, and evaluate it on DATASETS.TEST.

    It needs no training data and builds no optimizer. Hooks of HOOKS that use evaluation points or loading run too;
    hooks that a trainer class builds or registers do not.

    Args:
        trainer_class: a subclass of `DefaultTrainer`, whose ``build_model`` and ``test`` are used.

    Raises:
        ConfigError: a setting is not accepted.
    """

    def __init__(self, cfg: CfgNode, trainer_class: Any) -> None:
        super().__init__()
        import_modules(cfg.IMPORTS)
        check_values(cfg)
        cfg = prepare_projects(cfg)
        self.cfg = resolve_lengths(cfg, 1)  # the length of an epoch does not matter here

        def build(cfg: CfgNode) -> nn.Module:
            return on_device(cfg, trainer_class.build_model(cfg))

        self.model = build_parallel(self.cfg, ModelBuilder(build, trainer_class))
        me, self._test = weakref.proxy(self), trainer_class.test
        self.checkpointer = Checkpointer(self.model, checkpoint_dir(self.cfg), save_to_disk=False, trainer=me)
        hooks, points = ConfiguredHooks(self.cfg.HOOKS, me), ("evaluated_models", *EVALUATION_POINTS)
        made = hooks.rest(without_training=True)
        self.register_hooks([hook for hook in made if any(overrides(hook, point) for point in points)])

    @property
    def only_evaluates(self) -> bool:
        """Whether ``model`` has the weights to evaluate after loading, not a hook."""
        return not any(overrides(hook, "evaluated_models") for hook in self.hooks)

    def run(self) -> dict[str, Any]:
        """Evaluate; return the results on rank 0.

        Raises:
            ConfigError: there is nothing to evaluate.
            trainkit.checkpoint.CheckpointError: the file is missing, broken, or of another model.
            SystemExit: with code 1 if the results differ from TEST.EXPECTED_RESULTS.
        """
        if self.cfg.MODEL.WEIGHTS:
            self.checkpointer.load(self.cfg.MODEL.WEIGHTS, ["trainer"] if self.hooks else [])
        elif self.checkpointer.has_checkpoint():
            self.checkpointer.resume_or_load(None, resume=True)
        else:
            raise ConfigError(
                f"there is nothing to evaluate: set MODEL.WEIGHTS, since {self.checkpointer.save_dir} has no checkpoint"
            )
        self.iter = self.last_done_iter + 1  # as after the last iteration of the training
        with EventStorage(self.iter) as self.storage, observe_inference(self, "test"):
            results = evaluate_models(self._test, self.cfg, self.model, self.hooks)
            if self.storage.images() and "tensorboard" in self.cfg.LOG.WRITERS and comm.is_main_process():
                for writer in default_writers(self.cfg.OUTPUT_DIR, names=["tensorboard"]):
                    writer.write()
                    writer.close()
        if comm.is_main_process() and self.cfg.TEST.EXPECTED_RESULTS:
            verify_results(self.cfg, results)
        return results
