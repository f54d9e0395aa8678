"""What writers import before training if it is there.

In `EventWriter.begin`, in the loop: workers that a loader forks while another thread imports may wait for that import
for ever.
"""

import contextlib
import importlib


def import_installed(name: str) -> None:
    """Import a module that is needed only if it is there."""
    with contextlib.suppress(ImportError):
        importlib.import_module(name)


def import_image_formats() -> None:
    """Import what is needed to write images."""
    with contextlib.suppress(ImportError):
        importlib.import_module("PIL.Image").preinit()
