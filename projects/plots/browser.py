"""A headless Chromium for the pictures of pages."""

import shutil
import subprocess
import tempfile
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The path of the program."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def take_screenshot(page: Path, picture: Path, width: int, height: int) -> None:
    """Show a page without a network, and write what the window shows.

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
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--virtual-time-budget=5000",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            f"--screenshot={picture}",
            page.resolve().as_uri(),
        ]
        subprocess.run(command, capture_output=True, timeout=120, check=True)
