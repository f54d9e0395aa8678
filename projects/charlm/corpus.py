"""The source text of Python's standard library, as numbers."""

import hashlib
import logging
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.config import ConfigError
from trainkit.engine import HookBase
from trainkit.engine.hooks import HOOK_REGISTRY

logger = logging.getLogger("trainkit.projects.charlm")

UNKNOWN = 0  # the token of all characters that are not in the vocabulary
# a token is an index into it
VOCABULARY = "\N{REPLACEMENT CHARACTER}\n" + "".join(map(chr, range(32, 127)))

# characters beyond ASCII count as 127, which is not in the vocabulary
_TOKEN_OF_CODE = np.full(128, UNKNOWN, np.uint8)
for _token, _character in enumerate(VOCABULARY[1:], 1):
    _TOKEN_OF_CODE[ord(_character)] = _token

# these hold tests, installed packages, programs, or tables instead of code
_LEFT_OUT = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
# of 256 numbers, so each has a tenth of the files
_HELD_OUT = {"val": range(26), "test": range(26, 52)}


def encode(text: str) -> np.ndarray:
    """The tokens of a text, uint8 ``[len(text)]``."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return _TOKEN_OF_CODE[np.minimum(codes, 127)]


def decode(tokens: Iterable[int]) -> str:
    return "".join(VOCABULARY[token] for token in tokens)


def split_of(path: str) -> str:
    """ "train", "val" or "test", from a hash of a file's path in the library, with "/" between its parts."""
    draw = hashlib.sha256(path.encode()).digest()[0]
    for split, draws in _HELD_OUT.items():
        if draw in draws:
            return split
    return "train"


@dataclass(frozen=True)
class Corpus:
    """The files of a library.

    Attributes:
        splits: "train", "val" and "test" -> the tokens of their files one after the other, uint8.
        digest: SHA-256 of the paths and contents of all files, in hexadecimal digits.
    """

    splits: dict[str, np.ndarray]
    digest: str
    num_files: int


def read_corpus(root: str | os.PathLike[str]) -> Corpus:
    """Read the ``*.py`` files of a library in the order of their paths."""
    parts: dict[str, list[bytes]] = {"train": [], "val": [], "test": []}
    digest = hashlib.sha256()
    paths = sorted(_paths(Path(root)))
    for path in paths:
        content = Path(root, path).read_bytes()
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
        tokens = encode(content.decode("utf-8", "replace"))
        parts[split_of(path)].append(tokens.tobytes())
    splits = {}
    for split, files in parts.items():
        splits[split] = np.frombuffer(b"".join(files), np.uint8)
    return Corpus(splits, digest.hexdigest(), len(paths))


def _paths(root: Path) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        here = Path(folder).relative_to(root)
        for name in files:
            if name.endswith(".py"):
                yield (here / name).as_posix()


@cache
def python_corpus() -> Corpus:
    """The library of the running Python; it is read once, and the log names it."""
    corpus = read_corpus(sysconfig.get_path("stdlib"))
    sizes = [f"{len(tokens):,} {split}" for split, tokens in corpus.splits.items()]
    logger.info(
        "Corpus: the standard library of Python %s, %d files, %s characters, SHA-256 %s",
        platform.python_version(),
        corpus.num_files,
        ", ".join(sizes),
        corpus.digest,
    )
    return corpus


@HOOK_REGISTRY.register()
class SameCorpus(HookBase):
    """Refuses to resume a run with another corpus than the one that it started with."""

    def state_dict(self) -> dict[str, Any]:
        return {"python": platform.python_version(), "digest": python_corpus().digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            ConfigError: the library is different.
        """
        here = self.state_dict()
        if state_dict["digest"] != here["digest"]:
            raise ConfigError(
                f"the run started with the library of Python {state_dict['python']} "
                f"(SHA-256 {state_dict['digest']}), but this is Python {here['python']} "
                f"(SHA-256 {here['digest']}); use that Python, or start a new run"
            )
