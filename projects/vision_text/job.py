"""The command line of the subclasses."""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from trainkit.config import get_cfg
from trainkit.engine import DefaultTrainer, default_argument_parser, launch, run

IMAGES: list[Any] = ["INPUT.TRAIN_TRANSFORM", "ToImage"]
IMAGES += ["INPUT.TEST_TRANSFORM", "ToImage"]
IMAGES += ["DATASETS.TRAIN", ["shapes_train"]]
IMAGES += ["DATASETS.TEST", ["shapes_test"]]


def start(
    trainer: type[DefaultTrainer], options: list[Any], arguments: list[str] | None = None
) -> Any:
    """Train as the command says; returns the results of the last evaluation, if it is done in this process."""
    args = default_argument_parser().parse_args(arguments)
    return launch(
        _main,
        args.num_gpus,
        args.num_machines,
        args.machine_rank,
        args.dist_url,
        args=(args, trainer, options),
    )


def _main(args: Namespace, trainer: type[DefaultTrainer], options: list[Any]) -> dict[str, Any]:
    script = sys.modules[trainer.__module__].__file__ or ""
    name = Path(script).stem
    cfg = get_cfg()
    cfg.merge_from_file(Path(__file__).with_name("base.yaml"))
    cfg.merge_from_list(["OUTPUT_DIR", f"./output/{name}_subclass", *options])
    return run(args, trainer, cfg)
