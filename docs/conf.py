"""Sphinx: the pages of this folder, and a reference made from the docstrings of what every package lists in ``__all__``."""

from __future__ import annotations

import abc
import importlib
import json
import pkgutil
import re
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import numpy.typing
from docutils import nodes
from sphinx.domains.python import PyObject
from sphinx.ext.autodoc.mock import mock

import foremoe
from foremoe.base import arrays

# Signatures show these names, where numpy's aliases spell out what they stand for; so before anything else is imported.
arrays.Array = type("Array", (), {"__module__": "builtins"})
numpy.typing.ArrayLike = type("ArrayLike", (), {"__module__": "builtins"})

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from docs import command_reference  # noqa: E402

# Files outside of this folder that are pages of the site.
INCLUDED = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Where the site and the repository are; without an entry, pages have no canonical address and no link to their source.
URLS = {"Documentation": "", "Repository": "", **PROJECT.get("urls", {})}

project, author, release = "foremoe", "the foremoe authors", foremoe.__version__
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
source_suffix = {".rst": "restructuredtext", ".md": "markdown", ".ipynb": "markdown"}
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]
html_theme = "furo"
html_theme_options: dict[str, Any] = {
    "source_repository": URLS["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
}
if URLS["Repository"]:
    html_theme_options["footer_icons"] = [{"name": "Repository", "url": URLS["Repository"], "html": "Repository", "class": ""}]
html_title = project
html_baseurl = f"{URLS['Documentation'].rstrip('/')}/" if URLS["Documentation"] else ""
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_show_sphinx = False
html_copy_source = False
myst_heading_anchors = 4

# Trainers are no part of this environment, and their adapters can be read without them.
autodoc_mock_imports = ["verl", "megatron", "omegaconf", "ray"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
# One backtick is a link where it names something documented, and code where it does not (a parameter, an array).
default_role = "py:obj"


def public() -> dict[str, list[str]]:
    """Packages that list what they offer, the outermost first, each with the names that no package before it has shown."""
    rooms = ["foremoe", "foremoe.levels"]
    rooms += [at.name for at in pkgutil.walk_packages(foremoe.__path__, "foremoe.") if at.ispkg]
    shown: set[int] = set()
    found: dict[str, list[str]] = {}
    for room in rooms:
        package = importlib.import_module(room)
        own = []
        for name in getattr(package, "__all__", ()):
            value = getattr(package, name)
            if not isinstance(value, types.ModuleType) and id(value) not in shown:
                shown.add(id(value))
                own.append(name)
        found[room] = own
    return {room: names for room, names in found.items() if names}


with mock(autodoc_mock_imports):
    autosummary_context = {"public": public()}


(ROOT / "docs" / "_reference").mkdir(exist_ok=True)
(ROOT / "docs" / "_reference" / "commands.md").write_text(command_reference.page())


def link(text: str, folder: Path) -> str:
    """A page whose links work on this site as on a forge: other pages as pages, files as downloads, the rest as text."""

    def fix(found: re.Match[str]) -> str:
        words, path, anchor = found.groups()
        at = (folder / path).resolve().relative_to(ROOT).as_posix()
        if at in INCLUDED or at.startswith("docs/"):
            return f"[{words}]({INCLUDED.get(at) or at.removeprefix('docs/')}{anchor or ''})"
        return f"[{words}](../{at})" if (ROOT / at).is_file() and not at.endswith(".md") else words

    return re.sub(r"\[([^]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)", fix, text)


def cell_text(cell: dict[str, Any]) -> str:
    """A cell of a notebook as Markdown, with the outputs that it was saved with."""
    if cell["cell_type"] == "markdown":
        return f"{cell['source']}\n"
    return "\n".join([f"```python\n{cell['source']}\n```\n", *map(output_text, cell["outputs"])])


def output_text(output: dict[str, Any]) -> str:
    """Returns a cell's printed text, or its last value as a picture or HTML if the value can be shown as one."""
    data = output.get("data", {})
    page = f"<img alt='' src='data:image/png;base64,{data['image/png']}'>" if "image/png" in data else data.get("text/html")
    return f"{page}\n" if page else f"```text\n{(output.get('text') or output['data']['text/plain']).rstrip()}\n```\n"


def on_page(app: Any, page: str, content: list[str]) -> None:
    if app.env.doc2path(page).suffix == ".ipynb":
        content[0] = "\n".join(map(cell_text, json.loads(content[0])["cells"]))
    content[0] = link(content[0], ROOT / "docs") if (ROOT / "docs" / f"{page}.md").exists() else content[0]


def on_include(app: Any, path: Path, page: str, content: list[str]) -> None:
    content[0] = link(re.sub("^# foremoe$", "# Overview", content[0], flags=re.MULTILINE), ROOT)


def shorten(app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returns: str) -> tuple[str, str]:
    """Defaults that a field makes anew for every object, in Python's own words."""
    return signature and signature.replace("<factory>", "..."), returns


def keep_colon(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """The sentence of an attribute as it is: napoleon takes what stands before a colon for its type."""
    if what in ("attribute", "property", "data") and lines:
        lines[0] = f": {lines[0]}"


def shown_bases(app: Any, name: str, obj: Any, options: Any, bases: list[type]) -> None:
    """Bases that a reader can look up: neither mix-ins of our own nor Python's."""
    bases[:] = [x for x in bases if x.__name__ != "ArrayValue" and x is not abc.ABC] or [object]


def drop_object(app: Any, doctree: Any) -> None:
    """No line on bases where there is none to look up."""
    for line in [line for line in doctree.findall(nodes.paragraph) if line.astext() == "Bases: object"]:
        line.parent.remove(line)


def resolve(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """A name by its last parts: signatures and docstrings name what a file imports, not the package that offers it.

    Code stays code, without a link: parameters, arrays and constants, what other packages define, and files of ours.
    """
    target, domain = node.get("reftarget", ""), env.get_domain("py")
    name = re.sub(r"^foremoe\..*\.(?=[A-Z])", "", target)
    for short in (name, name.rpartition(".")[0]):  # a field is described by its class
        found = [full for full, its in domain.objects.items() if f".{full}".endswith(f".{short}") and short and not its.aliased]
        if node.get("refdomain") == "py" and len(found) == 1:
            return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], found[0], node, contnode)
    return contnode if re.fullmatch(r"Array(Like)?|[a-z_]\w*|[A-Z_]+|[a-z]\w*(\.\w+)+", target) else None


def describe(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """The first paragraph of a page, for search engines and previews of links."""
    first = next((node.astext() for node in doctree.findall(nodes.paragraph)), "") if doctree else ""
    text = " ".join(first.split()) or PROJECT["description"]
    context["description"] = text if len(text) <= 200 else f"{text[:200].rpartition(' ')[0]} ..."
    context["picture"] = f"{app.config.html_baseurl}_static/report.png" if app.config.html_baseurl else ""
    if page.startswith("_reference/") or f"{page}.md" in INCLUDED.values():
        context["page_source_suffix"] = ""  # its text is not in a file of this folder, so that there is no link to edit it


def setup(app: Any) -> None:
    for field in PyObject.doc_field_types:
        field.label = "Attributes" if field.name == "variable" else field.label
    app.connect("source-read", on_page)
    app.connect("include-read", on_include)
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-process-docstring", keep_colon, priority=400)
    app.connect("autodoc-process-bases", shown_bases)
    app.connect("doctree-read", drop_object)
    app.connect("missing-reference", resolve)
    app.connect("html-page-context", describe)
