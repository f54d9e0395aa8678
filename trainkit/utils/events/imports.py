"""What writers import before training."""

import contextlib
import importlib


def import_installed(*names: str) -> None:
    """Import those of these modules that are there.

    For `EventWriter.begin`, in the loop: workers that a loader forks while another thread imports may wait for that
    import for ever.
    """
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def import_image_formats() -> None:
    """What is needed to write images, in the same way."""
    with contextlib.suppress(ImportError):
        importlib.import_module("PIL.Image").preinit()
