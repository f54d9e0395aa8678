"""Train all methods with several seeds, and print a table of the quality of their features."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate
from torch import Tensor, nn

from projects.selfsup.backbone import SelfSupModel
from trainkit.config import CfgNode, get_cfg
from trainkit.data import build_test_loader, build_train_loader
from trainkit.engine import DefaultTrainer, default_setup
from trainkit.engine.hooks import PreciseBN
from trainkit.evaluation import build_evaluator, inference_on_dataset
from trainkit.utils.env import seed_all_rng

METHODS = ("simsiam", "swav", "densecl", "deepcluster", "odc")
METRICS = ("probe", "knn", "nmi")

_FOLDER = Path(__file__).parent
_NUM_BATCHES = 20  # batches for precise batch-norm statistics


class RandomBackbone(SelfSupModel):
    """A backbone that is not trained; a step only runs it, so that batch norm collects its statistics."""

    def losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        for view in ("view1", "view2"):
            self.backbone(batch[view])
        return {}


def config(name: str, seed: int, output_dir: Path, options: Sequence[str] = ()) -> CfgNode:
    """The config in ``<name>.yaml`` with a seed, a folder for the run, and the options of the command line."""
    cfg = get_cfg()
    cfg.merge_from_file(str(_FOLDER / f"{name}.yaml"))
    cfg.merge_from_list(["SEED", seed, "OUTPUT_DIR", str(output_dir / f"{name}_{seed}"), *options])
    return cfg


def train(cfg: CfgNode) -> Mapping[str, float]:
    """The metrics on the test scans after the last iteration; an interrupted run is resumed."""
    default_setup(cfg, argparse.Namespace(resume=True))
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load()
    return trainer.train()["frozen"]


def evaluate_random(cfg: CfgNode) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """The test metrics of the random backbone of this seed; every method starts with this backbone.

    Returns:
        The metrics with initial batch-norm statistics (mean 0, variance 1), and with those of 20 batches of views.
    """
    seed_all_rng(cfg.SEED)
    model = RandomBackbone(cfg)
    initial = _evaluate(cfg, model)
    PreciseBN(0, model, build_train_loader(cfg), _NUM_BATCHES).update_stats()
    return initial, _evaluate(cfg, model)


def _evaluate(cfg: CfgNode, model: nn.Module) -> Mapping[str, float]:
    (name,) = cfg.DATASETS.TEST
    loader = build_test_loader(cfg, name)
    evaluator = build_evaluator(cfg, name)
    return inference_on_dataset(model, loader, evaluator)["frozen"]


def table(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """For each method and metric the mean over the seeds, and the value for each seed."""
    cells = []
    for method, by_seed in rows.items():
        row = [method]
        for metric in METRICS:
            row.append(_cell([of_seed[metric] for of_seed in by_seed]))
        cells.append(row)
    headers = ["", *(f"{metric}, %" for metric in METRICS)]
    return tabulate(cells, headers, tablefmt="pipe")


def _cell(values: Sequence[float]) -> str:
    each = " ".join(f"{value:.1f}" for value in values)
    return f"{statistics.mean(values):.1f} ({each})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--output-dir", type=Path, default=Path("output/selfsup/compare"))
    parser.add_argument(
        "--opts",
        nargs=argparse.REMAINDER,
        default=(),
        help="KEY VALUE pairs for every config; give them last",
    )
    args = parser.parse_args(arguments)

    def config_of(name: str, seed: int) -> CfgNode:
        return config(name, seed, args.output_dir, args.opts)

    initial = []
    precise = []
    for seed in args.seeds:
        with_initial, with_precise = evaluate_random(config_of("base", seed))
        initial.append(with_initial)
        precise.append(with_precise)
    rows = {"random backbone": initial, "the same, precise batch norm": precise}
    for method in args.methods:
        rows[method] = [train(config_of(method, seed)) for seed in args.seeds]
    print(table(rows))


if __name__ == "__main__":
    main()
