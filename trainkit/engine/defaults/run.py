"""A training script in one call, and evaluation without training (``--eval-only``)."""

import argparse
import logging
import os
import weakref
from typing import Any

from torch import nn

from trainkit.checkpoint import Checkpointer
from trainkit.config import (
    CfgNode,
    ConfigError,
    check_values,
    get_cfg,
    import_modules,
    prepare_projects,
    resolve_lengths,
)
from trainkit.engine.defaults.build import ModelBuilder, build_parallel
from trainkit.engine.defaults.folders import checkpoint_dir
from trainkit.engine.defaults.hooks import ConfiguredHooks
from trainkit.engine.defaults.setup import default_setup, user_errors_exit
from trainkit.engine.defaults.trainer import DefaultTrainer
from trainkit.engine.hook_base import EVALUATION_POINTS, HookBase
from trainkit.engine.hook_list import overrides
from trainkit.engine.loop import TrainerBase
from trainkit.evaluation import observe_inference, verify_results
from trainkit.modeling.build import choose_device, on_device
from trainkit.utils import comm
from trainkit.utils.events import EventStorage

logger = logging.getLogger(__name__)


def run(
    args: argparse.Namespace, trainer_class: type[DefaultTrainer], cfg: CfgNode | None = None
) -> dict[str, Any]:
    """Train, resume, evaluate or try a job, by the options of `default_argument_parser`.

    Every process calls it. ``--config-file`` and ``KEY VALUE`` pairs are merged into a copy of
    ``cfg``, unless it is frozen.

    Returns:
        The results of the last evaluation, on rank 0.

    Raises:
        SystemExit: see `user_errors_exit`; with code 1 if the results differ from
            TEST.EXPECTED_RESULTS.
    """
    with user_errors_exit():
        _check_launched(args)
        cfg = get_cfg() if cfg is None else cfg.clone()
        if not cfg.is_frozen():
            if args.config_file:
                cfg.merge_from_file(args.config_file)
            cfg.merge_from_list(args.opts)
        cfg.freeze()
        default_setup(cfg, args)
        if args.eval_only:
            return EvaluationRun(cfg, trainer_class).run(resume=args.resume)
        trainer = trainer_class(cfg)
        trainer.resume_or_load(resume=args.resume)
        return trainer.train()


def _check_launched(args: argparse.Namespace) -> None:
    """Raises ConfigError if the options ask for several processes, and this one is alone."""
    # a script may have a parser of its own, without these
    wanted = getattr(args, "num_gpus", 1) * getattr(args, "num_machines", 1)
    if wanted > 1 and not comm.is_initialized():
        raise ConfigError(
            f"the options ask for {wanted} processes, and this script has started one; call "
            "launch(main, args.num_gpus, args.num_machines, args.machine_rank, args.dist_url, "
            "args=(args,)), where main(args) calls run()"
        )


class EvaluationRun(TrainerBase):
    """Evaluate MODEL.WEIGHTS, or else the last checkpoint of the run, on DATASETS.TEST.

    It needs no training data and builds no optimizer. Hooks of HOOKS that use evaluation points or
    loading run too; hooks that a trainer class builds or registers do not. ``build_model`` and
    ``test`` of ``trainer_class`` are used.
    """

    def __init__(self, cfg: CfgNode, trainer_class: type[DefaultTrainer]) -> None:
        super().__init__()
        import_modules(cfg.IMPORTS)
        check_values(cfg)
        choose_device(cfg)
        cfg = prepare_projects(cfg)
        self.cfg = resolve_lengths(cfg, 1)  # the length of an epoch does not matter here
        self._trainer_class = trainer_class

        def build(cfg: CfgNode) -> nn.Module:
            return on_device(cfg, trainer_class.build_model(cfg))

        self.model = build_parallel(self.cfg, ModelBuilder(build, trainer_class))
        me = weakref.proxy(self)
        self.checkpointer = Checkpointer(
            self.model, checkpoint_dir(self.cfg), save_to_disk=False, trainer=me
        )
        configured = ConfiguredHooks(self.cfg.HOOKS, me)
        made = configured.rest(without_training=True)
        self.register_hooks([hook for hook in made if _is_for_evaluation(hook)])

    @property
    def only_evaluates(self) -> bool:
        """Whether ``model`` has the weights to evaluate after loading, not a hook."""
        return not any(overrides(hook, "evaluated_models") for hook in self.hooks)

    def run(self, *, resume: bool = False) -> dict[str, Any]:
        """Evaluate; return the results on rank 0.

        Args:
            resume: whether the last checkpoint of the run, if there is one, comes before
                MODEL.WEIGHTS.

        Raises:
            ConfigError: there is nothing to evaluate.
            CheckpointError: MODEL.WEIGHTS has not all weights of the model.
        """
        if not self.cfg.DATASETS.TEST and self._trainer_class.is_default("test"):
            raise ConfigError(
                "DATASETS.TEST is empty, so there is nothing to evaluate; name datasets there, "
                'such as those of DATASETS.VAL: DATASETS.TEST "[my_val]"'
            )
        has_run = self.checkpointer.has_checkpoint()
        if self.cfg.MODEL.WEIGHTS and not (resume and has_run):
            self._load_weights(self.cfg.MODEL.WEIGHTS, has_run)
        elif has_run:
            self.checkpointer.resume_or_load(None, resume=True)
        else:
            raise ConfigError(
                f"set MODEL.WEIGHTS, since {self.checkpointer.save_dir} has no checkpoint to "
                "evaluate"
            )
        self.iter = self.done  # as after the last iteration of the training
        with EventStorage(self.iter) as self.storage, observe_inference(self, "test"):
            results = self._trainer_class.test_with_hooks(self.cfg, self.model, self.hooks)
        if comm.is_main_process() and self.cfg.TEST.EXPECTED_RESULTS:
            verify_results(self.cfg, results)
        return results

    def _load_weights(self, path: str, has_run: bool) -> None:
        """Load MODEL.WEIGHTS; warn if the file is not of the run in OUTPUT_DIR."""
        folder = self.checkpointer.save_dir
        if has_run and os.path.dirname(os.path.abspath(path)) != os.path.abspath(folder):
            logger.warning(
                "MODEL.WEIGHTS is evaluated: '%s', not the run in '%s'; add --resume for the last "
                "checkpoint of the run",
                path,
                folder,
            )
        # the hooks may need their states
        self.checkpointer.load(path, ["trainer"] if self.hooks else [])
        self.checkpointer.check_complete()


def _is_for_evaluation(hook: HookBase) -> bool:
    points = ("evaluated_models", *EVALUATION_POINTS)
    return any(overrides(hook, point) for point in points)
