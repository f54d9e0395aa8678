"""Prints the Pythons of this machine that a CI run also uses, one on a line: version, path.

These are the newest of each minor version from 3.10 on, without the one that runs this script.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 10)
# free-threaded and debug builds have other ABIs, for which few packages are built
DESCRIBE = """
import sys
print(sys.implementation.name + sys.abiflags)
print(*sys.version_info[:3])
print(sys.executable)
"""


def candidates() -> list[Path]:
    """``python3.X`` in the folders of PATH, and the versions of pyenv."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    found = [file for folder in folders for file in folder.glob("python3.*")]
    found = [file for file in found if re.fullmatch(r"python3\.\d+", file.name)]
    try:
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True).stdout.strip()
    except OSError:  # there is no pyenv
        return found
    return [*found, *Path(root, "versions").glob("*/bin/python")]


def describe(python: Path) -> tuple[tuple[int, ...], str] | None:
    """Major, minor and micro version, and the path; None if this is no ordinary CPython that runs."""
    try:
        run = subprocess.run([python, "-c", DESCRIBE], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if run.returncode != 0:  # such as a shim of pyenv for a version that is not chosen
        return None
    kind, version, path = run.stdout.splitlines()
    if kind != "cpython":
        return None
    return tuple(int(number) for number in version.split()), path


def find_pythons() -> list[tuple[tuple[int, ...], str]]:
    """Versions and paths, in the order of the versions."""
    newest: dict[tuple[int, ...], tuple[tuple[int, ...], str]] = {}
    for python in candidates():
        found = describe(python)
        if found is None:
            continue
        minor = found[0][:2]
        if minor < OLDEST or minor == sys.version_info[:2]:
            continue
        newest[minor] = max(found, newest.get(minor, found))
    return sorted(newest.values())


if __name__ == "__main__":
    for version, path in find_pythons():
        print(".".join(map(str, version)), path)
