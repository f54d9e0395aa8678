"""How Sphinx builds these pages and the reference: ``sphinx-build -W -b html docs build/docs``."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "projects"))  # trainkit_selfsup

import trainkit.data
import trainkit.engine
from trainkit.utils.plugins import find_plugins

project = "trainkit"
version = release = trainkit.__version__
html_title = f"trainkit {version}"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_show_copyright = False
html_show_sourcelink = False
smartquotes = False  # keep --resume as it is

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
highlight_language = "none"  # a block without a language is the output of a program
rst_prolog = ".. highlight:: python\n"  # a block in the reference is from a docstring

add_module_names = False  # the title of a page has the name of the package
autodoc_default_options = {"member-order": "bysource", "no-value": True}
autodoc_inherit_docstrings = False  # describe the methods of HookBase only once
default_role = "py:obj"
maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

# The catalogs are the only objects of their classes, which nobody needs to know.
for catalog in ("DatasetCatalog", "MetadataCatalog"):
    kind = type(getattr(trainkit.data, catalog))
    source = ModuleAnalyzer.for_module(kind.__module__)
    source.analyze()
    source.tagorder |= {
        name.replace(kind.__name__, catalog): place for name, place in source.tagorder.items()
    }
    kind.__name__ = catalog
    setattr(trainkit.data, catalog, kind)

# What projects lend to a package is described with it; hooks with `trainkit.engine.hooks`, not once more.
lends = find_plugins().lends
for package, names in lends.items():
    module = importlib.import_module(package)
    if hasattr(module, "__all__"):
        elsewhere = lends["trainkit.engine.hooks"] if package == "trainkit.engine" else []
        lent = [name for name in names if name not in elsewhere]
        module.__all__ = [*dict.fromkeys([*module.__all__, *lent])]

# The docstring of an imported object, such as a registry, is in the file that creates it.
modules = {name: module for name, module in sys.modules.items() if name.startswith("trainkit.")}
docstrings = {name: ModuleAnalyzer.for_module(name).find_attr_docs() for name in modules}
made = {key: lines for documented in docstrings.values() for key, lines in documented.items()}
for package, module in modules.items():
    public = {("", name) for name in getattr(module, "__all__", ())}
    docstrings[package].update({key: made[key] for key in public & made.keys()})


def link_by_last_name(
    app: Sphinx, env: Any, node: Any, contnode: nodes.Element
) -> nodes.Element | None:
    """Link a name such as `EvalHook`, or a type in a signature, by the last part of the name.

    Returns None, which leaves it as text, if no public object or more than one has this name.
    """
    if node.get("refdomain") != "py":
        return None
    last = node["reftarget"].rpartition(".")[2]
    kinds = ("class", "exception", "function", "data")
    objects = env.domains.python_domain.objects.items()
    found = [
        entry
        for name, entry in objects
        if name.endswith(f".{last}") and entry.objtype in kinds and not entry.aliased
    ]
    if len(found) != 1:
        return None
    (entry,) = found
    uri = app.builder.get_relative_uri(node.get("refdoc", ""), entry.docname)
    return nodes.reference("", "", contnode, internal=True, refuri=f"{uri}#{entry.node_id}")


def link_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn links to files outside of this folder into downloads."""
    source[0] = re.sub(
        r"\[([^\]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)", r"{download}`\1 <\2>`", source[0]
    )


def set_dashes(app: Sphinx, doctree: nodes.document) -> None:
    """Set a dash between an argument and its meaning, for which Sphinx needs smartquotes."""
    for text in [text for text in doctree.findall(nodes.Text) if text == " -- "]:
        text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", link_by_last_name)
    app.connect("source-read", link_files)
    app.connect("doctree-read", set_dashes)
