"""The pages of the documentation, and the code and the commands on them."""

import importlib
import importlib.util
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    str(path.relative_to(ROOT))
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/*.md",
        "projects/README.md",
        "projects/*/README.md",
    )
    for path in sorted(ROOT.glob(pattern))
]

_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PROGRAM = r"(?:python|torchrun|pip|pytest|sphinx-build) "


def page(name):
    return (ROOT / name).read_text()


def fences(text):
    """Language and code of each block of a page, in their order."""
    return _FENCE.findall(text)


def blocks(name, language):
    """The code of a page in one language, in its order."""
    return [code for found, code in fences(page(name)) if found == language]


def run(source, where, **names):
    """What a block defines."""
    names.setdefault("__name__", "page")
    exec(compile(source, where, "exec"), names)
    return names


def contents(folder):
    """The files of a finished run, but its log, which an evaluation goes on with."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.is_file() and path.name != "log.txt"
    }


def shell_lines(text):
    """Lines of shell blocks, continued ones as one, and indented commands."""
    for language, code in fences(text):
        if language in ("sh", "bash"):
            yield from code.replace("\\\n", " ").splitlines()
    yield from re.findall(rf"^    ({_PROGRAM}.+)$", _FENCE.sub("", text), re.MULTILINE)


def inline_commands(text):
    """Those in the middle of the text, and those that a table makes by adding something to the command of the page."""
    base = next(
        iter(re.findall(r"python tools/\w*train_net\.py.*", "\n".join(shell_lines(text)))), None
    )
    text = _FENCE.sub("", text)
    for command in re.findall(rf"`({_PROGRAM}[^`]+)`", text):
        yield (
            command
            if "torchrun" not in command or ".py" in command
            else f"{command} tools/train_net.py"
        )
    _, _, table = text.partition("| to | add |\n|---|---|\n")
    for row in re.findall(r"^\| .+ \| (.+) \|$", table.partition("\n\n")[0], re.MULTILINE):
        for added in re.findall(r"`([^`]+)`", row):
            if added.endswith(".py"):
                yield f"python {added}"
            elif not re.match(_PROGRAM, added):
                yield f"{base} {added}"


def tool_of(words):
    """The module that a command runs, ``python tools/NAME.py`` or ``python -m NAME``, and its arguments."""
    python, script, *args = words
    assert python == "python"
    if script != "-m":
        return importlib.import_module(script.removesuffix(".py").replace("/", ".")), args
    name, *args = args
    if importlib.util.find_spec(name).submodule_search_locations is not None:
        name += ".__main__"  # it is a package
    return importlib.import_module(name), args


def commands(line):
    """The commands of a line of the shell, in words."""
    words = shlex.shlex(line, posix=True, punctuation_chars="&;|")
    words.whitespace_split = True
    command = []
    for word in [*words, ";"]:
        if word == "exec":
            continue
        if word.strip("&;|"):
            command.append(word)
        elif command:
            yield command
            command = []
