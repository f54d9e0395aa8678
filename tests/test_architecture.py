"""Who may import whom, and that nothing happens at import; read from the syntax trees, nothing is imported here."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

from tests.capability_names import JOBS

ROOT = Path(__file__).parent.parent

# A module imports from lines above its own and from its own part, never from its own line's neighbours or from below.
LAYERS = [
    ["trainkit.utils"],
    ["trainkit.config"],
    ["trainkit.checkpoint", "trainkit.data", "trainkit.modeling", "trainkit.solver"],
    ["trainkit.evaluation"],
    [
        "trainkit.engine.finite",
        "trainkit.engine.launch",
        "trainkit.engine.losses",
        "trainkit.engine.parallel",
        "trainkit.engine.untrained",
    ],
    ["trainkit.engine.hook_base"],
    ["trainkit.engine.hook_list", "trainkit.engine.stopping"],
    ["trainkit.engine.attributes"],
    ["trainkit.engine.loop"],
    [
        "trainkit.engine.data_size",
        "trainkit.engine.feed",
        "trainkit.engine.metrics",
        "trainkit.engine.policies",
    ],
    ["trainkit.engine.step"],
    ["trainkit.engine.amp"],
    ["trainkit.engine.train_loop"],
    ["trainkit.engine.hooks"],
    ["trainkit.engine.defaults.folders", "trainkit.engine.defaults.hooks"],
    ["trainkit.engine.defaults.setup"],
    ["trainkit.engine.defaults.build"],
    ["trainkit.engine.defaults.parts", "trainkit.engine.defaults.monitored"],
    ["trainkit.engine.defaults.trainer"],
    ["trainkit.engine.defaults.run"],
    ["trainkit.engine.defaults"],
    ["trainkit.engine"],
    ["trainkit.testing.record", "trainkit.testing.processes", "trainkit.testing.marker"],
    ["trainkit.testing.compare"],
    ["trainkit.testing.exact"],
    ["trainkit.testing"],
    ["trainkit.projects"],
    ["trainkit_selfsup"],
    ["projects", "tools"],
]

# who may call importlib.import_module, and what for
LATE_IMPORTS = {
    "tools.benchmarks.peers": "other trainers, which nobody needs",
    "trainkit.projects.plots.__main__": "matplotlib or plotly, optional packages",
    "trainkit.projects.weights.safetensors": "safetensors, an optional package",
    "trainkit.projects.sharding.format": "torch.distributed.checkpoint takes as long to import as torch",
    "trainkit.config.projects": "IMPORTS, the one place where a config names code",
    "trainkit.projects.export.program": "onnxruntime, an optional package",
    "trainkit.projects.finders.lr": "matplotlib, an optional package",
    "trainkit.projects.predict.samples": "Pillow, which only pictures need",
    "trainkit.projects.hooks.visualization": "Pillow, which nobody needs before the first picture",
    "trainkit.projects.lazy.config": "what the import statements of a config file call",
    "trainkit.projects.lazy.nodes": "omegaconf, an optional package; and locate(), which finds an object by its name",
    "trainkit.projects.loggers.services": "wandb, mlflow and pandas, optional packages",
    "trainkit.projects.remote.store": "fsspec, which only addresses need",
    "trainkit.projects.loggers.tensorboard_writer": "tensorboard, an optional package",
    "trainkit.projects.compat.memory": "cloudpickle, an optional package",
    "trainkit.projects.sharding.fsdp": "torch.distributed.fsdp takes as long to import as torch",
    "trainkit.projects.sharding.tensors": "torch.distributed.tensor takes as long to import as torch",
    "trainkit.utils.plugins": "projects, when something of them is asked for",
    "trainkit.utils.logger": "tabulate takes a third as long to import as the rest of trainkit",
}

# what reads source code or walks the garbage collector; the package must work without its sources
READERS_OF_SOURCE = {
    "ast.parse",
    "ast.walk",
    "gc.get_objects",
    "gc.get_referents",
    "gc.get_referrers",
    "inspect.getsource",
    "inspect.getsourcelines",
    "linecache.getline",
    "linecache.getlines",
}
PURE = {
    "compile",
    "copy",
    "frozenset",
    "getLogger",
    "int",
    "list",
    "local",
    "object",
    "set",
    "split",
    "tuple",
    "type",
}
PURE |= {
    "_until_save_point",
    "attrgetter",
    "count",
    "field",
    "forwarded",
    "itemgetter",
    "lending",  # makes two functions, and looks for plug-ins when they are called
    "property",
}
PURE |= {"startswith", "staticmethod", "timedelta", "vars"}


class Sources:
    """Every module of some packages, parsed."""

    def __init__(self, root, packages):
        files = [file for package in packages for file in sorted((root / package).rglob("*.py"))]
        # LazyConfig runs the former
        files = [file for file in files if file.parent.name not in ("configs", "tests")]
        self.trees = {
            self._name(file.relative_to(root)): ast.parse(file.read_text()) for file in files
        }
        self.packages = {
            self._name(file.relative_to(root)) for file in files if file.name == "__init__.py"
        }

    @staticmethod
    def _name(path):
        parts = path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts
        # as it is installed
        name = ".".join(parts).removeprefix("projects." if "trainkit_selfsup" in parts else "")
        return (
            f"trainkit.{name}"
            if parts[0] == "projects" and len(path.parts) > 2 and parts[1] not in JOBS
            else name
        )

    def imports(self, module):
        """The modules of ours that ``module`` names in an import; a package stands for its ``__init__``."""
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.trees)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, (
                    f"{module} has a relative import; write the module's full name"
                )
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    if submodule in self.trees or node.module in self.trees:
                        yield submodule if submodule in self.trees else node.module

    def executed(self, module):
        """What ``module`` imports, and the ``__init__`` of the packages that this runs on the way."""
        for target in self.imports(module):
            parts = target.split(".")
            parents = {".".join(parts[:i]) for i in range(1, len(parts))} & self.packages
            yield target
            yield from (parent for parent in parents if not f"{module}.".startswith(f"{parent}."))


def part_of(module):
    """The longest entry of LAYERS that holds the module, and its line."""
    found = [
        (len(part), line, part)
        for line, parts in enumerate(LAYERS)
        for part in parts
        if f"{module}.".startswith(f"{part}.")
    ]
    return max(found)[1:] if found else None


def upward_imports(sources):
    for module in sources.trees:
        for target in sources.imports(module):
            here, there = part_of(module), part_of(target)
            if here is None or there is None:
                # it reports the version
                if (module, target) != (
                    "trainkit.utils.collect_env",
                    "trainkit",
                ):
                    yield f"{module} imports {target}, one of which is in no layer"
            elif here != there and here[0] <= there[0]:
                yield f"{module} imports {target}, which is not below it"


def own_package_imports(sources):
    for module in sources.trees:
        for target in sources.imports(module):
            if module.startswith(f"{target}.") and target != "trainkit":
                yield f"{module} imports {target}, the package it is in; import the module it needs"


def import_cycle(sources):
    try:
        graphlib.TopologicalSorter(
            {module: set(sources.executed(module)) for module in sources.trees}
        ).prepare()
    except graphlib.CycleError as error:
        return " <- ".join(error.args[1])
    return None


def late_imports(sources):
    for module, tree in sources.trees.items():
        # all plug-ins are imported, so their functions import what they need
        is_plugin = re.fullmatch(r"trainkit\.projects\.\w+\.plugin", module)
        for function in ast.walk(tree):
            if is_plugin or not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    yield f"{module}.{function.name} has an import inside"
        for node in ast.walk(tree):
            names_importer = (
                isinstance(node, ast.Attribute) and node.attr in ("import_module", "__import__")
            ) or (isinstance(node, ast.Name) and node.id in ("import_module", "__import__"))
            if names_importer and module not in LATE_IMPORTS:
                yield f"{module} imports by name and is not in LATE_IMPORTS"


def reads_of_source(module, tree):
    """Each use of one of READERS_OF_SOURCE."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in READERS_OF_SOURCE:
            yield f"{module}:{node.lineno}: {ast.unparse(node)}"


def effects_at_import(module, tree):
    """Statements of the module and its classes that do more than define a name of the module."""
    definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    in_classes = [
        statement
        for node in definitions
        if isinstance(node, ast.ClassDef)
        for statement in node.body
    ]
    own = {node.name for node in definitions}
    for statement in [*tree.body, *in_classes]:
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.For):
            own |= {
                n.id
                for n in ast.walk(statement)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
    for statement in [*tree.body, *in_classes]:
        if not _defines(statement, own):
            yield f"{module}:{statement.lineno}: {ast.unparse(statement).splitlines()[0]}"


def _defines(statement, own):
    match statement:
        case (
            ast.Import()
            | ast.ImportFrom()
            | ast.FunctionDef()
            | ast.AsyncFunctionDef()
            | ast.ClassDef()
            | ast.Pass()
        ):
            return True
        case ast.Delete(targets=[ast.Name()]):  # of a name of the module
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring, or the ellipsis of a Protocol
            return True
        case ast.Try(body=body):  # a module that the platform may not have
            return all(isinstance(inner, ast.Import | ast.ImportFrom) for inner in body)
        case ast.If(test=test):
            return ast.unparse(test) in ("__name__ == '__main__'", "TYPE_CHECKING")
        # the same for several objects of the module
        case ast.For(iter=ast.Tuple(elts=elements), target=ast.Name()):
            return all(_root(element) in own for element in elements) and all(
                _defines(s, own) for s in statement.body
            )
        # such as a registration
        case ast.Expr(value=ast.Call(func=ast.Attribute() as method) as call):
            return _root(method) in own and all(map(_is_pure, _calls(*call.args, *call.keywords)))
        case ast.Assign(targets=targets, value=value):
            targets = [part for target in targets for part in getattr(target, "elts", [target])]
            return all(_root(target) in own for target in targets) and all(
                map(_is_pure, _calls(value))
            )
        case ast.AugAssign(target=ast.Name(id=name), value=value):  # a longer __all__
            return name in own and all(map(_is_pure, _calls(value)))
        case ast.AnnAssign(target=target, value=value):
            return _root(target) in own and (value is None or all(map(_is_pure, _calls(value))))
    return False


def _root(node):
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _calls(*nodes):
    return [inner for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Call)]


def _is_pure(call):
    """The construction of an object, or one of PURE."""
    name = ast.unparse(call.func).split(".")[-1]
    return name.lstrip("_")[:1].isupper() or name in PURE


@pytest.fixture(scope="module")
def sources():
    return Sources(ROOT, ["trainkit", "tools", "projects"])


def test_imports_run_one_way_without_a_cycle_or_the_package_that_a_module_is_in(sources):
    assert {
        "trainkit.utils.events.storage",
        "tools.train_net",
        "trainkit.projects.graph.trainer",
    } <= {*sources.trees}
    assert [module for module in sources.trees if part_of(module) is None] == ["trainkit"]
    assert [*upward_imports(sources), *own_package_imports(sources)] == []
    assert import_cycle(sources) is None


def readers_of_the_config(sources):
    """The modules of the core that import the config, but for those that may."""
    for module in sources.trees:
        is_core = module.startswith("trainkit.") and not module.startswith("trainkit.projects.")
        may = module.startswith(("trainkit.config", "trainkit.engine.defaults"))
        if not is_core or may or module.endswith(".build"):
            continue
        for imported in sources.imports(module):
            # a decorator, which reads no key
            if imported == "trainkit.config.from_config":
                continue
            if imported.startswith("trainkit.config"):
                yield f"{module} imports {imported}"


def test_only_the_default_trainer_and_the_builders_know_the_config(sources):
    assert [*readers_of_the_config(sources)] == []


def test_imports_stand_at_the_top_of_a_module(sources):
    assert list(late_imports(sources)) == []


def test_a_plug_in_imports_only_small_modules_of_trainkit_at_its_top(sources):
    """Every process that has a config imports all plug-ins."""
    plugins = [module for module in sources.trees if module.endswith(".plugin")]
    imported = {
        target
        for module in plugins
        for node in sources.trees[module].body
        for target in imported_at_top(node)
    }
    assert len(plugins) > 20
    assert imported <= {
        "trainkit.config",
        "trainkit.config.checks",
        "trainkit.config.projects",
        "trainkit.utils",
        "trainkit.utils.errors",
        "trainkit.utils.periods",
        "argparse",
        "collections.abc",
        "shlex",
        "sys",
        "typing",
    }


def imported_at_top(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) else []


def test_nothing_happens_at_import(sources):
    trees = {
        module: tree
        for module, tree in sources.trees.items()
        if module.split(".")[0] in ("trainkit", "trainkit_selfsup")
        and module != "trainkit.projects"  # see there
    }
    assert [
        effect for module, tree in trees.items() for effect in effects_at_import(module, tree)
    ] == []


def test_the_core_reads_no_source_code(sources):
    core = {
        module: tree
        for module, tree in sources.trees.items()
        if part_of(module) is not None
        and module.startswith("trainkit.")
        and not module.startswith("trainkit.projects")
    }
    assert len(core) > 50
    assert [use for module, tree in core.items() for use in reads_of_source(module, tree)] == []
    example = ast.parse("import ast, inspect\ntree = ast.parse(inspect.getsource(ast))")
    assert len(list(reads_of_source("module", example))) == 2


@pytest.fixture
def write(tmp_path):
    def write(files):
        folders = [
            "",
            "utils/",
            "config/",
            "data/",
            "evaluation/",
            "solver/",
            "engine/",
            "engine/hooks/",
        ]
        for name, text in {
            **{f"trainkit/{folder}__init__.py": "" for folder in folders},
            **files,
        }.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Sources(tmp_path, ["trainkit"])

    return write


def test_an_import_that_does_not_run_downwards_is_found(write):
    files = dict.fromkeys(
        ["trainkit/config/config.py", "trainkit/evaluation/b.py", "trainkit/engine/metrics.py"], ""
    )
    for module, line in (
        ("utils/a", "from trainkit.config import config"),
        ("data/build", "from trainkit.evaluation.b import x"),
        ("engine/loop", "from trainkit.engine import metrics"),
        ("engine/hooks/a", "from trainkit.engine import y"),
        ("solver/a", "from trainkit import z"),
    ):
        name = f"trainkit/{module}.py"
        assert len(list(upward_imports(write({**files, name: line})))) == 1
        write({name: ""})


def test_a_module_of_the_core_that_reads_the_config_is_found(write):
    modules = ("data/build", "data/loader", "engine/defaults/run")
    line = "from trainkit.config import config"
    files = {f"trainkit/{module}.py": line for module in modules}
    sources = write({"trainkit/config/config.py": "", **files})
    assert [*readers_of_the_config(sources)] == [
        "trainkit.data.loader imports trainkit.config.config"
    ]


def test_a_cycle_and_an_import_of_the_own_package_are_found(write):
    files = {
        "trainkit/data/__init__.py": "from trainkit.data.build import x",
        "trainkit/data/build.py": "from trainkit.utils.b import y",
        "trainkit/data/c.py": "",
        "trainkit/utils/b.py": "from trainkit.data import c",
    }
    assert import_cycle(write(files)) is not None
    assert import_cycle(write({**files, "trainkit/utils/b.py": "import torch"})) is None
    assert (
        len(list(own_package_imports(write({"trainkit/data/c.py": "from trainkit.data import x"}))))
        == 1
    )


def test_a_late_import_and_an_effect_at_import_are_found(write):
    for text in (
        "class A:\n    def f(self):\n        if self:\n            from os import path",
        "import importlib\ndef f(): importlib.import_module('os')",
        "from importlib import import_module\nf = import_module",
        "def f(): __import__('os')",
    ):
        assert list(late_imports(write({"trainkit/a.py": text}))), text
    for text in (
        "import os\nos.environ['A'] = '1'",
        "import logging\nlogging.basicConfig()",
        "def f(): pass\nf()",
        "class A:\n    x = open('file')",
        "if True:\n    x = 1",
        "with open('x') as f:\n    pass",
        "import other\nother.REGISTRY.register(int)",
        "import os\na, os.x = 1, 2",
        "import os\nos.x = 1\ndef f():\n    os = 1",
    ):
        assert len(list(effects_at_import("module", ast.parse(text)))) == 1, text
