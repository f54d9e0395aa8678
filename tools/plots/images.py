"""The pictures of a run's `VisualizationHook`, within limits."""

import base64
import re
from dataclasses import dataclass
from pathlib import Path

from plots.runs import Run
from trainkit.utils.periods import say_done

MOST_IMAGES = 24  # of all runs on a page
MOST_BYTES = 8 << 20

_NAME = re.compile(r"(?P<data>.+)_iter(?P<iter>\d+)_batch(?P<batch>\d+)(?P<more>.*)")


@dataclass(frozen=True)
class Image:
    caption: str
    uri: str


def read_images(run: Run, num_runs: int = 1) -> tuple[list[Image], int]:
    """The newest pictures, and how many more there are.

    Args:
        num_runs: this many runs share the limits of the page.
    """
    files = sorted((run.folder / "visualization").rglob("*.png"), key=_age)
    images: list[Image] = []
    bytes_left = MOST_BYTES // num_runs
    for file in files:
        bytes_left -= file.stat().st_size
        if len(images) == max(1, MOST_IMAGES // num_runs) or bytes_left < 0:
            break
        images.append(
            Image(
                _caption(file, run),
                "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode(),
            )
        )
    return images, len(files) - len(images)


def _age(file: Path) -> tuple[int, Path]:
    match = _NAME.fullmatch(file.stem)
    return (-int(match["iter"]) if match else 1), file


def _caption(file: Path, run: Run) -> str:
    match = _NAME.fullmatch(file.stem)
    if match is None:
        return file.stem
    batch = f"batch {int(match['batch'])}{match['more'].replace('_', ' ')}"
    return f"{match['data']} ({file.parent.name}), {say_done(run.done_after(int(match['iter'])))}, {batch}"
