"""Predict with a trained model, for samples of a dataset or of files.

::

    python -m trainkit.projects.predict output/digits --dataset digits_test --num 5
    python -m trainkit.projects.predict output/digits --input scans.npy --output predictions.pt
    python -m trainkit.projects.predict --config-file job.yaml --weights model.pth --input a.jsonl
    python -m trainkit.projects.predict output/mine --script train.py --input *.jpg

RUN is the folder of a run. Its config.yaml describes the model. The weights are those of its best
checkpoint, or else of its last one. If CHECKPOINT.DIR is relative, call this where the run was
started, or give --weights. --script names the file of a job in which a subclass of DefaultTrainer
builds the model.

Input, one sample after the other, in the form of the test dataset before its transform:

  .npy           an array [N, ...] of N samples
  .npz           arrays [N, ...], by the names that their values have in a sample
  .pt, .pth      a tensor [N, ...], a dict of such tensors, or a list of samples
  .png, .jpg     one sample: its pixels, uint8 [H, W, 3], or [H, W] of a gray image
  .jsonl         a sample per line: {"image": [[0, 13], [7, 2]]}; lists of numbers become arrays,
                 int64 or float32

Output is one JSON object per sample, on the standard output or in a .jsonl file. If a prediction
has one score for each of the dataset's class_names, the output has the best classes with their
probabilities. These are the softmax of the scores, or the scores if they are probabilities already.
For scores of every pixel, it has the classes with their share of the pixels; for other large
tensors their shape and range. A number that is not finite is null. A line also has the label of the
sample, and its id, image_id, name, file_name and path, if it has them. A .pt file gets the list of
the predictions without changes. A file is written completely or not at all.
"""

import argparse
import itertools
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from trainkit.projects.finders.command import check_writable, positive
from trainkit.projects.finders.script import SCRIPT_HELP, find_trainer
from trainkit.projects.predict.batches import predict_dataset, predict_samples
from trainkit.projects.predict.predictor import DefaultPredictor
from trainkit.projects.predict.report import TOP_K, write_lines
from trainkit.projects.predict.run import cfg_of_run
from trainkit.projects.predict.samples import samples_of_file

from trainkit.checkpoint.atomic import replacing
from trainkit.config import CfgNode
from trainkit.data import MetadataCatalog
from trainkit.engine import DefaultTrainer, user_errors_exit
from trainkit.utils.device import move_to_device


def main(args: argparse.Namespace) -> None:
    """Write the predictions, and on the standard error a line that names their checkpoint."""
    with user_errors_exit():
        if args.output is not None:
            check_writable(args.output)
        cfg = cfg_of_run(args.run, args.config_file, args.weights, args.opts)
        trainer = find_trainer(cfg, args.script)
        predictor = DefaultPredictor(cfg, trainer.build_model)
        predicted = _predict(predictor, trainer, args)
        class_names = _class_names(cfg, args.dataset)
        if args.output is None:
            number = write_lines(_print, predicted, class_names, args.top_k)
        else:
            number = _write_file(args.output, predicted, class_names, args.top_k)
    print(f"{number} predictions with {cfg.MODEL.WEIGHTS}", file=sys.stderr)


def _predict(
    predictor: DefaultPredictor, trainer: type[DefaultTrainer], args: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], Any]]:
    if args.dataset:
        return predict_dataset(predictor, trainer, args.dataset, args.num)
    parts = (samples_of_file(path, args.key) for path in args.input)
    samples = itertools.islice(itertools.chain.from_iterable(parts), args.num)
    return predict_samples(predictor, samples, f"--input {' '.join(args.input)}")


def _class_names(cfg: CfgNode, dataset: str | None) -> Sequence[Any]:
    """Those of the dataset, else of the first dataset of the config that has any."""
    datasets = [dataset] if dataset else [*cfg.DATASETS.TEST, *cfg.DATASETS.VAL]
    for name in datasets:
        names: Sequence[Any] = MetadataCatalog.get(name).get("class_names")
        if names:
            return names
    return ()


def _print(line: str) -> None:
    print(line, end="", flush=True)


def _write_file(
    path: str,
    predicted: Iterable[tuple[dict[str, Any], Any]],
    class_names: Sequence[Any],
    top_k: int | None,
) -> int:
    """Write all predictions or no file: lines of JSON, or a list for ``torch.load``."""
    with replacing(os.path.realpath(path)) as output:
        if path.endswith(".jsonl"):
            return write_lines(
                lambda line: output.write(line.encode()), predicted, class_names, top_k
            )
        predictions = []
        for _, prediction in predicted:
            predictions.append(move_to_device(prediction, torch.device("cpu")))
        torch.save(predictions, cast(Any, output))
        return len(predictions)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trainkit.projects.predict",
        usage="%(prog)s RUN (--dataset NAME | --input FILE ...) [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--config-file",
        default="",
        metavar="FILE",
        help="use this config instead of the config.yaml of the run",
    )
    parser.add_argument(
        "--weights",
        default="",
        metavar="FILE",
        help="use this checkpoint instead of the best one of the run",
    )
    parser.add_argument("--script", default="", metavar="FILE", help=SCRIPT_HELP)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--dataset", metavar="NAME", help="a dataset that the modules of IMPORTS register"
    )
    source.add_argument("--input", nargs="+", metavar="FILE", help="files with samples, see above")
    parser.add_argument(
        "--key", default="image", help='name of a bare array in a sample, "" for none (image)'
    )
    parser.add_argument("--num", type=positive, metavar="N", help="only the first N samples")
    parser.add_argument("--top-k", type=positive, metavar="K", help=f"number of classes ({TOP_K})")
    parser.add_argument("--output", type=_output, metavar="FILE", help="a .jsonl or .pt file")
    parser.add_argument(
        "--opts", nargs="+", default=[], metavar="KEY VALUE", help="changes to the config"
    )
    return parser.parse_args(arguments)


def _output(text: str) -> str:
    if Path(text).suffix not in (".jsonl", ".pt"):
        raise argparse.ArgumentTypeError(f"need a name that ends in .jsonl or .pt, got {text!r}")
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text!r} does not exist; make it first")
    return text


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    main(parse_args())
