"""Where the syntax tree of a module names a capability or imports a project."""

import ast
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

# projects that train something, with public names only; the others are capabilities
JOBS = {"charlm", "digits", "segmentation", "selfsup", "trainkit_selfsup", "vision_text"}
CAPABILITIES = sorted({file.parent.name for file in ROOT.glob("projects/*/__init__.py")} - JOBS)

# Words of a name, or two words that follow each other.
NAMES = {
    "fsdp",
    "shard",
    "shards",
    "sharded",
    "sharding",
    "logical",
    "replay",
    "capsule",
    "fork",
    "forked",
    "remote",
}
NAMES |= {
    "elastic",
    "requeue",
    "requeued",
    "wandb",
    "mlflow",
    "lars",
    "layer decay",
    "graph",
    "graphs",
    "lazy",
    "s3",
}
NAMES |= {"tensor parallel"}
# of DDP, of detectron2's ToIterableDataset, of torch.compile
OTHER_MEANING = {
    "static_graph",
    "STATIC_GRAPH",
    "shard_sampler",
    "shard_chunk_size",
    "explain_graph_break",
}


def is_of_capability(name):
    words = re.findall(
        r"[a-z]+\d*|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    )
    return bool(NAMES & {*words, *map(" ".join, itertools.pairwise(words))})


def imported_projects(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [start + alias.name for alias in node.names]
            yield from (
                name
                for name in names
                if re.match(r"(trainkit\.)?projects(\.|$)|trainkit_selfsup", name)
            )


def names_of_capabilities(file, tree):
    """Of the file, its classes, functions, parameters and attributes; not those of other packages, such as os.fork."""
    names = set(Path(file).with_suffix("").parts)
    foreign = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if not alias.name.startswith("trainkit")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            targets = [
                target
                for s in node.body
                for target in getattr(s, "targets", [getattr(s, "target", None)])
            ]
            names |= {node.name, *(target.id for target in targets if isinstance(target, ast.Name))}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] not in foreign:
            names.add(node.attr)
    return {name for name in names - OTHER_MEANING if is_of_capability(name)}
