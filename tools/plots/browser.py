"""A headless Chromium, which shows the page to the tests and to render_examples.py."""

import shutil
import subprocess
import tempfile
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome")
# the browser itself loads nothing either
_QUIET = (
    "background-networking",
    "component-update",
    "sync",
    "quic",
)


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, _NAMES)), None)


def run_chromium(page: Path, *args: str) -> str:
    """Show a file without a network.

    Args:
        args: such as ``--dump-dom`` or ``--screenshot=FILE``, and ``--window-size=WIDTH,HEIGHT``.

    Returns:
        The output of Chromium.

    Raises:
        FileNotFoundError: there is no Chromium.
        subprocess.SubprocessError: it fails, or takes longer than two minutes.
    """
    chromium = find_chromium()
    if chromium is None:
        raise FileNotFoundError(
            f"need one of {', '.join(_NAMES)}; on Debian: apt-get install chromium"
        )
    with tempfile.TemporaryDirectory() as profile:
        command = [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        command += [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND"]
        command += [*(f"--disable-{name}" for name in _QUIET), *args, page.resolve().as_uri()]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=True
        ).stdout
