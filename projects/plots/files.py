"""What else the page shows of a run's folder: confusion matrices and pictures, within limits."""

import base64
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from trainkit.projects.plots.runs import Run, readable

logger = logging.getLogger(__name__)

MOST_CLASSES = 200
MOST_IMAGES = 24  # of all runs on a page
MOST_BYTES = 8 << 20

_NAME = re.compile(r"(?P<data>.+)_iter(?P<iter>\d+)_batch(?P<batch>\d+)(?P<more>.*)")


@dataclass(frozen=True)
class Confusion:
    """
    Attributes:
        title: the dataset and the progress of the run.
        matrix: the number of samples, by true class and predicted class.
    """

    title: str
    classes: list[str]
    matrix: list[list[float]]


def read_confusions(run: Run) -> list[Confusion]:
    """The matrices in a run's ``confusion_<dataset>.json``; a warning names each file that holds something else."""
    found = []
    for file in sorted(run.folder.glob("confusion_*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            classes = [readable(str(name)) for name in content["class_names"]]
            matrix = content["confusion"]
            iteration = content.get("iteration")
            is_square = [len(row) for row in matrix] == [len(classes)] * len(classes)
            is_count = all(0 <= number < 1 << 63 for row in matrix for number in row)
            if not is_square or not is_count or not 0 < len(classes) <= MOST_CLASSES:
                raise ValueError
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            logger.warning(
                "%s is left out: it holds no matrix of counts with a name for each of at most %d classes",
                file,
                MOST_CLASSES,
            )
            continue
        title = readable(file.stem.removeprefix("confusion_"))
        if type(iteration) is int:
            title += f", {run.say_done(iteration)}"
        found.append(Confusion(title, classes, matrix))
    return found


@dataclass(frozen=True)
class Image:
    """A PNG file as a ``data:`` address."""

    caption: str
    uri: str


def read_images(run: Run, num_runs: int) -> tuple[list[Image], int]:
    """The newest pictures of the `VisualizationHook`, and how many more there are.

    Args:
        num_runs: this many runs share the limits of the page.
    """
    folder = run.folder / "visualization"
    files = [file for file in folder.rglob("*.png") if _is_inside(file, folder)]
    images: list[Image] = []
    bytes_left = MOST_BYTES // num_runs
    for file in sorted(files, key=_age):
        bytes_left -= file.stat().st_size
        if len(images) == max(1, MOST_IMAGES // num_runs) or bytes_left < 0:
            break
        content = base64.b64encode(file.read_bytes()).decode()
        images.append(Image(_caption(file, run), f"data:image/png;base64,{content}"))
    return images, len(files) - len(images)


def _is_inside(file: Path, folder: Path) -> bool:
    """Whether no link leads elsewhere."""
    return file.is_file() and file.resolve().is_relative_to(folder.resolve())


def _age(file: Path) -> tuple[int, Path]:
    match = _NAME.fullmatch(file.stem)
    return (-int(match["iter"]) if match else 1), file


def _caption(file: Path, run: Run) -> str:
    match = _NAME.fullmatch(file.stem)
    if match is None:
        return readable(file.stem)
    done = run.say_done(int(match["iter"]))
    batch = f"batch {int(match['batch'])}{match['more'].replace('_', ' ')}"
    return readable(f"{match['data']} ({file.parent.name}), {done}, {batch}")
