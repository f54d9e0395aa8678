#!/usr/bin/env python
"""Predict with a trained model, for samples of a dataset or of files.

::

    python tools/predict.py output/digits --dataset digits_test --num 5
    python tools/predict.py output/digits --input scans.npy --output predictions.pt
    python tools/predict.py --config-file projects/digits/config.yaml --weights model.pth --input samples.jsonl
    python tools/predict.py output/mine --script train.py --input *.jpg

RUN is the folder of a run. Its config.yaml describes the model. The weights are those of its best checkpoint, or else
of its last one. If CHECKPOINT.DIR is relative, call this where the run was started, or give --weights. --script names
the file of a job in which a subclass of DefaultTrainer builds the model.

Input, one sample after the other, in the form of the test dataset before its transform:

  .npy           an array [N, ...] of N samples
  .npz           arrays [N, ...], by the names that their values have in a sample
  .pt, .pth      a tensor [N, ...], a dict of such tensors, or a list of samples
  .png, .jpg     one sample: its pixels, uint8 [H, W, 3], or [H, W] of a gray image
  .jsonl         a sample per line: {"image": [[0, 13], [7, 2]]}; lists of numbers become arrays, int64 or float32

Output is one JSON object per sample, on the standard output or in a .jsonl file. If a prediction has one score for each
of the dataset's class_names, the output has the best classes with their probabilities. These are the softmax of the
scores, or the scores if they are probabilities already. For scores of every pixel, it has the classes with their share
of the pixels; for other large tensors their shape and range. A number that is not finite is null. A line also has the
label of the sample, and its id, image_id, name, file_name and path, if it has them. A .pt file gets the list of the
predictions without changes. A file is written completely or not at all.
"""

import argparse
import itertools
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset, default_collate
from trainkit.projects.evaluators.samples import SampleCounter
from user_job import SCRIPT_HELP, find_trainer, positive

from trainkit.checkpoint import CheckpointError
from trainkit.checkpoint.atomic import replacing
from trainkit.checkpoint.file import read_file
from trainkit.checkpoint.folder import candidates, choose
from trainkit.config import CfgNode, ConfigError, get_cfg
from trainkit.data import DatasetCatalog, MetadataCatalog, build_test_loader
from trainkit.data.build import build_transform
from trainkit.engine import DefaultPredictor, DefaultTrainer, user_errors_exit
from trainkit.engine.defaults.folders import checkpoint_dir
from trainkit.engine.hooks.checkpoint import best_file_prefixes
from trainkit.utils.device import move_to_device

ROOT = Path(__file__).resolve().parents[1]
TOP_K = 3  # number of classes that are shown if classes have names
# entries of a sample that its line shows
TOLD = (
    "id",
    "image_id",
    "name",
    "file_name",
    "path",
    "label",
)
MAX_VALUES = 16  # larger tensors are not printed


# ---------------------------------------------------------------------------- the model


def build_cfg(args: argparse.Namespace) -> CfgNode:
    """The config of a run or of a file, with MODEL.WEIGHTS.

    Raises:
        ConfigError: there is no config, or there are no weights.
        trainkit.checkpoint.CheckpointError: none of the run's checkpoints is intact.
    """
    cfg = get_cfg()
    if args.run is None and not args.config_file:
        raise ConfigError("name the folder of a run, or a --config-file")
    if args.run is not None and not os.path.isdir(args.run):
        raise ConfigError(
            f"{args.run!r} is not a folder; name the folder of a run, or a --config-file and --weights"
        )
    cfg.merge_from_file(args.config_file or os.path.join(args.run, "config.yaml"))
    if args.run is not None:
        cfg.OUTPUT_DIR = args.run  # the folder may have been moved
    cfg.merge_from_list(args.opts)
    weights = (
        args.weights or (cfg.MODEL.WEIGHTS if args.run is None else "") or _weights_of_run(cfg)
    )
    if cfg.CHECKPOINT.get("TRAINABLE_ONLY") and all(
        entry.get("NAME") != "FrozenWeights" for entry in cfg.HOOKS
    ):
        # as in the run
        cfg.HOOKS = [
            *cfg.HOOKS,
            {"NAME": "FrozenWeights", "WEIGHTS": cfg.MODEL.WEIGHTS},
        ]
    cfg.MODEL.WEIGHTS = weights
    cfg.freeze()
    return cfg


def _weights_of_run(cfg: CfgNode) -> str:
    folder = checkpoint_dir(cfg)
    best = [
        os.path.join(folder, f"{prefix}.pth")
        for prefix in best_file_prefixes(cfg.CHECKPOINT.BEST_METRIC).values()
    ]
    path = next(filter(os.path.exists, best), "") or choose(candidates(folder))[0]
    if not path:
        raise ConfigError(f"there is no checkpoint in {folder!r}; name one with --weights")
    return path


# ---------------------------------------------------------------------------- the samples


def samples_of_file(path: str, key: str) -> Iterator[Any]:
    """The samples of one file. If the file has one array, it gets the name ``key`` in a sample; "": no name.

    Raises:
        ConfigError: the file cannot be read, or does not hold samples.
    """
    readers: dict[str, Callable[[str], Any]] = {
        ".npy": lambda path: np.load(path, mmap_mode="r"),
        ".npz": _read_npz,
        ".pt": partial(read_file, kind=object),
        ".pth": partial(read_file, kind=object),
        ".jsonl": _read_json_lines,
        **dict.fromkeys((".png", ".jpg", ".jpeg"), _read_image),
    }
    suffix = Path(path).suffix.lower()
    if suffix not in readers:
        raise ConfigError(
            f"--input {path!r} has the suffix {suffix!r}; accepted: {', '.join(readers)}"
        )
    is_empty = True
    try:
        for sample in _split(readers[suffix](path), key):
            is_empty = False
            yield sample
    except ConfigError as error:
        raise ConfigError(f"--input {path!r} {error}") from None
    except CheckpointError as error:
        raise ConfigError(f"--input: {error}") from None
    except Exception as error:  # torch raises many types on damaged archives
        reason = getattr(error, "strerror", None) or _first_line(error)
        raise ConfigError(f"--input {path!r} cannot be read: {reason}") from error
    if is_empty:
        raise ConfigError(f"--input {path!r} holds no samples; name a file that has some")


def _read_npz(path: str) -> dict[str, Any]:
    with np.load(path) as arrays:
        return dict(arrays)


def _read_image(path: str) -> np.ndarray:
    """One sample, ``[1, H, W]`` or ``[1, H, W, 3]``."""
    with Image.open(path) as image:
        return np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))[None]


def _read_json_lines(path: str) -> Iterator[Any]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _with_arrays(json.loads(line))
                except ValueError as error:
                    raise ConfigError(f"is not JSON in line {number}: {error}") from None


def _with_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_arrays(item) for name, item in value.items()}
    if not isinstance(value, list) or not value:
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return value
    if array.dtype.kind not in "biuf":
        return value
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def _split(content: Any, key: str) -> Iterator[Any]:
    """Split the content of a file into samples."""
    if isinstance(content, Mapping):
        if wrong := [name for name, value in content.items() if not getattr(value, "ndim", 0)]:
            raise ConfigError(f"holds {wrong[0]!r}, which is not an array [N, ...]; leave it out")
        if len({len(value) for value in content.values()}) > 1:
            lengths = {name: len(value) for name, value in content.items()}
            raise ConfigError(
                f"holds arrays of different lengths: {lengths}; the first axis counts the samples"
            )
        for values in zip(*content.values(), strict=True):
            yield dict(zip(content, values, strict=True))
    elif isinstance(content, np.ndarray | Tensor):
        if content.ndim == 0:
            raise ConfigError("holds a single number; samples are an array [N, ...]")
        yield from (
            {key: np.array(v) if isinstance(v, np.ndarray) else v} if key else v for v in content
        )
    elif isinstance(content, list | Iterator):
        yield from content
    else:
        raise ConfigError(
            f"holds a {type(content).__name__}, accepted are arrays, dicts of them and lists of samples"
        )


# ---------------------------------------------------------------------------- the predictions


def predict_dataset(
    predictor: DefaultPredictor, trainer: type[DefaultTrainer], name: str, num: int | None
) -> Iterator[tuple[Any, Any]]:
    """(names and label of a sample, its prediction) for the first ``num`` samples of a dataset, or for all, in order.

    The loader is that of an evaluation, with DATALOADER.NUM_WORKERS workers, which also transform the samples. A
    trainer with its own ``build_test_loader`` gives the batches, which must then hold the names of samples.

    Raises:
        ConfigError: no dataset has this name.
    """
    batches: Iterable[tuple[list[Any], Any]]
    if not trainer.is_default("build_test_loader"):
        loader = trainer.build_test_loader(predictor.cfg, name)
        count = SampleCounter(predictor.model, loader)
        batches = ((_told_of_batch(batch, count(batch)), batch) for batch in loader)
    elif name not in DatasetCatalog:
        raise ConfigError(f"--dataset: {DatasetCatalog.explain_unknown(name)}")
    elif hasattr(dataset := DatasetCatalog.get(name), "__getitem__"):
        batches = _loader_of(predictor.cfg, dataset, num)
    else:
        samples = itertools.islice(dataset, num)
        yield from (
            (_told(sample), prediction) for sample, prediction in predict(predictor, samples)
        )
        return
    predicted = (
        zip(told, predictor.predict_batch(batch, len(told)), strict=True) for told, batch in batches
    )
    yield from itertools.islice(itertools.chain.from_iterable(predicted), num)


def _loader_of(cfg: CfgNode, dataset: Any, num: int | None) -> Iterable[tuple[list[Any], Any]]:
    """Batches of a dataset, each with names and labels of its samples, since a transform may remove these."""
    chosen = Subset(dataset, range(len(dataset))[:num])
    num_batches = math.ceil(len(chosen) / cfg.TEST.IMS_PER_BATCH)
    return build_test_loader(
        chosen,
        mapper=partial(_transformed, build_transform(cfg, is_train=False)),
        batch_size=cfg.TEST.IMS_PER_BATCH,
        # a worker starts too slowly for one batch
        num_workers=min(cfg.DATALOADER.NUM_WORKERS, num_batches - 1),
        collate_fn=partial(
            _collated, default_collate if cfg.DATALOADER.COLLATE == "default" else list
        ),
        prefetch_factor=cfg.DATALOADER.PREFETCH_FACTOR,
        timeout=cfg.DATALOADER.TIMEOUT,
    )


def _transformed(transform: Callable[[Any], Any] | None, sample: Any) -> tuple[Any, Any]:
    return _told(sample), sample if transform is None else transform(sample)


def _collated(
    collate: Callable[[list[Any]], Any], samples: list[tuple[Any, Any]]
) -> tuple[list[Any], Any]:
    return [told for told, _ in samples], collate([sample for _, sample in samples])


def predict(
    predictor: DefaultPredictor, samples: Iterable[Any], origin: str = ""
) -> Iterator[tuple[Any, Any]]:
    """(sample, its prediction), computed in batches of TEST.IMS_PER_BATCH.

    Args:
        origin: named in the error if a batch cannot be predicted; "": the error is not the user's mistake.

    Raises:
        ConfigError: a batch cannot be predicted.
    """
    iterator, num_done = iter(samples), 0
    while batch := list(itertools.islice(iterator, predictor.cfg.TEST.IMS_PER_BATCH)):
        try:
            outputs = predictor(batch)
        except Exception as error:  # a transform or a model may raise anything
            if not origin:
                raise
            last = num_done + len(batch) - 1
            which = f"samples {num_done} to {last}" if last > num_done else f"sample {last}"
            raise ConfigError(
                f"{origin}: {which} cannot be predicted, a sample has to "
                f"look like one of the test dataset before its transform: {_first_line(error)}"
            ) from error
        num_done += len(batch)
        yield from zip(batch, outputs, strict=True)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def describe(prediction: Any, class_names: Sequence[str], top_k: int | None) -> Any:
    """A prediction in values that JSON can hold, except NaN and infinities.

    Args:
        top_k: number of classes; None: 3 if there are ``class_names``, else no classes.
    """
    if isinstance(prediction, Mapping):
        return {
            str(name): describe(value, class_names, top_k) for name, value in prediction.items()
        }
    if isinstance(prediction, list | tuple):
        return [describe(value, class_names, top_k) for value in prediction]
    if not isinstance(prediction, Tensor):
        return (
            prediction
            if isinstance(prediction, str | int | float | bool | None)
            else str(prediction)
        )
    if prediction.is_floating_point() and prediction.ndim in (1, 3):
        has_names = len(prediction) == len(class_names)
        if has_names or (top_k and prediction.ndim == 1):
            names = (
                list(class_names) if has_names else [str(index) for index in range(len(prediction))]
            )
            return _best_classes(prediction.float(), names, top_k or TOP_K)
    if prediction.is_complex():
        return str(prediction)
    if prediction.numel() <= MAX_VALUES:
        return prediction.tolist()
    values = prediction.double()
    return {
        "shape": list(prediction.shape),
        **{name: getattr(values, name)().item() for name in ("min", "max", "mean")},
    }


def _best_classes(scores: Tensor, names: Sequence[Any], top_k: int) -> list[dict[str, Any]]:
    """The best classes: for ``[C]`` with their probabilities, for ``[C, H, W]`` with their shares of the pixels."""
    if scores.ndim == 1:
        are_probabilities = bool((scores >= 0).all()) and abs(scores.sum().item() - 1) < 1e-3
        what, shares = "prob", scores if are_probabilities else scores.softmax(dim=0)
    else:
        what, shares = (
            "pixels",
            scores.argmax(dim=0).flatten().bincount(minlength=len(scores)) / scores[0].numel(),
        )
    values, indices = shares.topk(min(top_k, len(shares)))
    return [
        {"class": str(names[index]), "index": index, what: round(value, 6)}
        for index, value in zip(indices.tolist(), values.tolist(), strict=True)
        if what == "prob" or value > 0
    ]


def _with_nulls(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot hold, by None."""
    if isinstance(value, dict):
        return {name: _with_nulls(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_nulls(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _told(sample: Any) -> dict[str, Any]:
    """The names and the label of a sample, if it has them."""
    found: Any = (
        {name: sample[name] for name in TOLD if name in sample}
        if isinstance(sample, Mapping)
        else {}
    )
    found = {
        name: value.item() if getattr(value, "ndim", None) == 0 else value
        for name, value in found.items()
    }
    return {name: value for name, value in found.items() if type(value) in (int, str)}


def _told_of_batch(batch: Any, num: int) -> list[dict[str, Any]]:
    if isinstance(batch, Mapping):
        columns = {name: batch[name] for name in TOLD if name in batch and len(batch[name]) == num}
        return [_told({name: values[i] for name, values in columns.items()}) for i in range(num)]
    return [_told(sample) for sample in batch] if isinstance(batch, list) else [{}] * num


# ---------------------------------------------------------------------------- the output


def write_lines(
    write: Callable[[str], object],
    predicted: Iterable[tuple[Any, Any]],
    class_names: Sequence[Any],
    top_k: int | None,
) -> int:
    """One JSON object per prediction; returns their number."""
    num_written = 0
    for told, prediction in predicted:
        label = told.get("label")
        if type(label) is int and 0 <= label < len(class_names):
            told = {**told, "label": str(class_names[label])}
        row = {
            "sample": num_written,
            **told,
            "prediction": _with_nulls(describe(prediction, class_names, top_k)),
        }
        write(json.dumps(row, allow_nan=False) + "\n")
        num_written += 1
    return num_written


def check_writable(path: str) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    is_new = not os.path.lexists(path)
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{path!r} cannot be written: {error.strerror}; name another file"
        ) from error
    if is_new:
        os.remove(path)


def write_file(
    path: str, predicted: Iterable[tuple[Any, Any]], class_names: Sequence[Any], top_k: int | None
) -> int:
    """Write all predictions or no file: as lines of JSON, or unchanged as a list for ``torch.load``."""
    with replacing(os.path.realpath(path)) as output:
        if path.endswith(".jsonl"):
            return write_lines(
                lambda line: output.write(line.encode()), predicted, class_names, top_k
            )
        predictions = [
            move_to_device(prediction, torch.device("cpu")) for _, prediction in predicted
        ]
        torch.save(predictions, cast(Any, output))
        return len(predictions)


# ---------------------------------------------------------------------------- the command line


def main(args: argparse.Namespace) -> None:
    """Write the predictions, and on the standard error a line that names their checkpoint."""
    with user_errors_exit():
        if args.output is not None:
            check_writable(args.output)
        cfg = build_cfg(args)
        trainer = find_trainer(cfg, args.script)
        predictor = DefaultPredictor(cfg, trainer.build_model)
        if args.dataset:
            predicted = predict_dataset(predictor, trainer, args.dataset, args.num)
        else:
            samples = itertools.chain.from_iterable(
                samples_of_file(path, args.key) for path in args.input
            )
            chosen = itertools.islice(samples, args.num)
            found = predict(predictor, chosen, f"--input {' '.join(args.input)}")
            predicted = ((_told(sample), prediction) for sample, prediction in found)
        datasets = [args.dataset] if args.dataset else [*cfg.DATASETS.TEST, *cfg.DATASETS.VAL]
        names = (MetadataCatalog.get(name).get("class_names") for name in datasets)
        # those of the first dataset that has any
        class_names: Sequence[Any] = next(filter(None, names), ())
        if args.output is None:
            number = write_lines(
                partial(print, end="", flush=True), predicted, class_names, args.top_k
            )
        else:
            number = write_file(args.output, predicted, class_names, args.top_k)
    print(f"{number} predictions with {cfg.MODEL.WEIGHTS}", file=sys.stderr)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
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


def invoke_main() -> None:
    """Run with the options of the command line."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # | head
    # so that IMPORTS can name projects, and modules in the current folder
    sys.path += [
        str(ROOT),
        str(Path.cwd()),
    ]
    main(parse_args())


if __name__ == "__main__":
    invoke_main()
