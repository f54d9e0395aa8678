"""Lint of what a user can be told in an error or a warning: read from the syntax trees, and held to a few rules.

A placeholder in a message stands as ``«expression»``, so that braces in it are braces.
"""

import ast
import dataclasses
import itertools
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ["trainkit", "tools", "projects"]

LOG = {"warning", "error", "critical", "exception"}
# our own invariants, exit codes, and what Python's protocols ask for: an attribute or an index that is not there
NOT_FOR_USERS = {"AssertionError", "AttributeError", "IndexError", "SystemExit", "StopIteration"}
ENDINGS = ("Error", "Exception")


@dataclasses.dataclass(frozen=True)
class Message:
    """One text of one call; a call with alternatives in its text gives several."""

    file: str
    line: int
    kind: str  # name of the exception, "error" of a parser, or "log"
    text: str

    def __str__(self):
        return f"{self.file}:{self.line} {self.kind}: {self.text}"

    @property
    def words(self):
        """The text without what stands in its place when it is shown."""
        return re.sub("«.*?»", "", self.text, flags=re.DOTALL)

    @property
    def is_error(self):
        return self.kind != "log"


# ---------------------------------------------------------------------- collecting


class Messages:
    """All messages of some source texts, as ``{file: text}``."""

    def __init__(self, sources):
        self._functions = defaultdict(list)
        trees = {file: ast.parse(text) for file, text in sources.items()}
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    self._functions[node.name].append(node)
        self.all = [
            message for file, tree in trees.items() for message in self._of_file(file, tree)
        ]

    def _of_file(self, file, tree):
        for call, scopes in _calls(tree, [tree]):
            kind = _kind(call)
            if kind is None or not call.args:
                continue
            texts = self._texts(call.args[0], scopes)
            if kind == "log":
                texts = [_fill(text, call.args[1:]) for text in texts]
            yield from (Message(file, call.lineno, kind, text) for text in dict.fromkeys(texts))

    def _texts(self, node, scopes, depth=0):
        """What ``node`` can be as text; a placeholder where that is not simple."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                return self._joined(values, scopes, depth)
            case ast.BinOp(op=ast.Add()):
                return self._joined([node.left, node.right], scopes, depth)
            case ast.FormattedValue(value=value, conversion=conversion):
                texts = self._texts(value, scopes, depth)
                return texts if conversion == -1 else [f"«{ast.unparse(value)}!{chr(conversion)}»"]
            case ast.IfExp():
                return self._either([node.body, node.orelse], scopes, depth, node)
            case ast.Name(id=name) if depth < 4:
                for scope in reversed(scopes):
                    if values := list(_assigned(name, scope)):
                        return self._either(values, scopes, depth + 1, node)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if depth < 4:
                found = self._functions[name]
                if len(found) == 1:
                    values = [
                        n.value
                        for n in ast.walk(found[0])
                        if isinstance(n, ast.Return) and n.value is not None
                    ]
                    return self._either(values, [found[0]], depth + 1, node)
        return [f"«{ast.unparse(node)}»"]

    def _joined(self, nodes, scopes, depth):
        parts = [self._texts(node, scopes, depth) for node in nodes]
        return ["".join(choice) for choice in itertools.product(*parts)]

    def _either(self, nodes, scopes, depth, whole):
        """The texts of all ``nodes``, if they are texts of ours; else ``whole`` as a placeholder."""
        texts = [text for node in nodes for text in self._texts(node, scopes, depth)]
        are_ours = bool(texts) and all(
            re.sub("«.*?»", "", text, flags=re.DOTALL).strip() or not text for text in texts
        )
        return texts if are_ours else [f"«{ast.unparse(whole)}»"]


def _calls(node, scopes):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, scopes
        yield from _calls(child, [*scopes, child] if isinstance(child, ast.FunctionDef) else scopes)


def _kind(call):
    """What sort of message a call gives, or None."""
    *owner, name = ast.unparse(call.func).split(".")
    if name in NOT_FOR_USERS:
        return None
    if (name[0].isupper() and name.endswith(ENDINGS)) or (owner == ["self"] and name == "error"):
        return name
    if owner == ["parser"] and name == "error":
        return "error"
    is_log = owner in (["logger"], ["_logger"]) and name in LOG
    return "log" if is_log or (owner == ["warnings"] and name == "warn") else None


def _assigned(name, scope):
    statements = scope.body if isinstance(scope, ast.Module) else ast.walk(scope)
    for node in statements:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == name for t in node.targets
        ):
            yield node.value


def _fill(text, args):
    """A log line with its arguments in the places of ``%s`` and the like."""
    values = iter([ast.unparse(arg) for arg in args])
    return re.sub(
        "%[-.0-9]*[sdrgf]",
        lambda found: f"«{next(values, '...')}{'!r' * (found[0] == '%r')}»",
        text,
    )


# ---------------------------------------------------------------------- rules: each returns whether a message breaks it

# What is in the first place is a name, so that it keeps its capital or small letter: SOLVER.X, EMAHook, max_iter, 'x'
NAME = re.compile(
    r"[«'`{@]|--?\w|\S*[A-Z_.]\S*[A-Z_.]|\S+\.\S|\w+=|\w+_\w+|Throughput\b|[A-Z]+\b|[a-z]\w*\b(?= must| is «| \()"
)
WRAPPED = re.compile(
    r"«[^»]*(error|reason|failure|failed|problem|obstacle|defect|damage|broken)[^»]*»$"
)
REFUSED = re.compile(
    r"\b(must be|must have|must hold|must name|must return|must give|must differ|accepted:|need \S+ [<>=])"
)
UNKNOWN = re.compile(r"\bunknown\b|\bno \w+ is called «|\bthere is no «|(^|: )no «")
KNOWN = re.compile(
    r"did you mean|accepted|registered|there (is|are):? «|takes|use \w+, |similar|«accepts»|«_nearest"
)


def says_nothing_of_its_own(message):
    """Only a placeholder, which is no other error's text: nobody can say what it will read."""
    return not message.words.strip() and not WRAPPED.search(message.text)


def names_nothing(message):
    """Neither a value nor an argument, a key, a file or a class: what is it about?"""
    return not re.search(
        r"«|`|'|--\w|[A-Z]\w*\.?[A-Z_]|\w_\w|\w\(|\w=|^\w+ (is|must)\b", message.text
    )


def hides_the_value(message):
    """What is refused stands in the config or in a variable, often computed: the one who set it has to see it."""
    return message.is_error and bool(REFUSED.search(message.text)) and "«" not in message.text


def says_unknown_and_not_what_is_known(message):
    """Most unknown names are typing errors: the right one has to be seen."""
    return (
        message.is_error and bool(UNKNOWN.search(message.text)) and not KNOWN.search(message.text)
    )


def begins_wrong(message):
    """An error continues "error: ", a log line is a sentence of its own."""
    if NAME.match(message.text):
        return False
    return message.text[:1].isupper() == message.is_error


def ends_with_a_mark(message):
    """Messages are put into others, after which something follows."""
    return message.text.endswith((".", "!", ";", ",", " ")) or "!" in message.words.replace(
        "!=", ""
    )


def is_polite_or_vague(message):
    """ "Invalid" says that something is wrong and not what; courtesy is in the way of what to do."""
    words = r"please|sorry|unfortunately|invalid|illegal|oops|bad|something|went wrong|fatal"
    return bool(re.search(rf"\b({words})\b", message.words, flags=re.IGNORECASE))


def names_a_private_attribute(message):
    """A user can neither look it up nor change it."""
    return bool(re.search(r"(?<![\w_])_[a-z]\w*", message.words))


def is_too_long(message):
    """A line that is not read to its end does not say what stands there."""
    return len(message.words) > 300


def names_no_command_for_a_package(message):
    """The name of a package is often not that of its extra."""
    return "needs the package" in message.text and "pip install" not in message.text


RULES = [
    says_nothing_of_its_own,
    names_nothing,
    hides_the_value,
    says_unknown_and_not_what_is_known,
    begins_wrong,
    ends_with_a_mark,
    is_polite_or_vague,
    names_a_private_attribute,
    is_too_long,
    names_no_command_for_a_package,
]

# (rule, how the message starts) -> why it need not keep the rule
EXCEPTIONS = {
    (
        says_nothing_of_its_own,
        "«text»",
    ): "the text of an error whose state must not be kept in memory",
    (names_nothing, "holds a single number"): "behind --input FILE",
    (names_nothing, "Storing or writing metrics failed"): "the traceback follows",
}


def faults(messages, exceptions):
    for rule, message in itertools.product(RULES, messages):
        if rule(message) and not any(
            rule is other and message.text.startswith(begin) for other, begin in exceptions
        ):
            yield f"{rule.__name__}: {message}"


# ---------------------------------------------------------------------- examples, by which the rules are held

BREAKS = [
    (says_nothing_of_its_own, "raise ValueError(describe(x))"),
    (names_nothing, "raise ValueError('the length is not enough; give more')"),
    (hides_the_value, "raise ValueError('max_iter must be >= 1')"),
    (hides_the_value, "parser.error('need --num-gpus >= 1')"),
    (
        says_unknown_and_not_what_is_known,
        "raise ValueError(f'unknown kind {kind!r}; choose another')",
    ),
    (
        says_unknown_and_not_what_is_known,
        "raise ValueError(f'there is no {kind} {name!r}; set another')",
    ),
    (begins_wrong, "raise ValueError(f'The value {x!r} is too large; lower it')"),
    (begins_wrong, "logger.warning('the file %s is gone, it is started again', path)"),
    (ends_with_a_mark, "raise ValueError(f'period must be >= 1, got {period}.')"),
    (ends_with_a_mark, "logger.warning('Oh no! %s is left out, as it is empty', path)"),
    (is_polite_or_vague, "raise ValueError(f'invalid mode {mode!r}; accepted: max, min')"),
    (is_polite_or_vague, "logger.error('Something is wrong with %s, training goes on', path)"),
    (names_a_private_attribute, "raise ValueError(f'set _count to 1, got {count}')"),
    (is_too_long, f"raise ValueError(f'period must be {'very ' * 60} long, got {{period}}')"),
    (
        names_no_command_for_a_package,
        "raise ImportError('WandbWriter needs the package wandb; install it')",
    ),
]
KEEPS = """
raise ValueError(f'period must be >= 1 iteration, got {period}')
raise ConfigError(f'{key} is {value!r}; accepted: {accepted}')
raise ImportError("a PNG needs the package matplotlib: pip install 'trainkit[plot]'")
raise CheckpointError(str(error))
logger.warning('%s has no weight decay; SOLVER.WEIGHT_DECAY* have no effect', name)
"""


def found(source):
    return Messages({"example": source}).all


def faults_of_the_rules():
    """A rule that misses its example, or finds what keeps it, would let every message pass, or none."""
    for rule, source in BREAKS:
        broken = [other.__name__ for message in found(source) for other in RULES if other(message)]
        if broken != [rule.__name__]:
            yield f"the example {source!r} breaks {broken} and not {rule.__name__}"
    yield from faults(found(KEEPS), {})


def main():
    """Print each fault; 1 if there is one."""
    paths = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    files = [path for path in paths if "tests" not in path.relative_to(ROOT).parts]
    messages = Messages({str(file.relative_to(ROOT)): file.read_text() for file in files}).all
    problems = [*faults_of_the_rules(), *faults(messages, EXCEPTIONS)]
    for exception in EXCEPTIONS:
        if not list(faults(messages, EXCEPTIONS.keys() - {exception})):
            problems.append(
                f"no message needs the exception {exception[0].__name__}, {exception[1]!r} any more"
            )
    print(*problems, f"{len(messages)} messages, {len(problems)} faults", sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
