"""Build the documentation's site: `nox -s docs`. Its pages stay where they are kept, beside what they describe.

The folder of sources is the repository itself: links between pages are those of the repository, valid in both.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = Path(__file__).resolve().parents[2]

project = "tr"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "packages/tr-all/docs/index"
include_patterns = [
    "packages/*/README.md", "packages/*/CHANGELOG.md", "packages/*/SECURITY.md", "packages/*/docs/**.md",
    "packages/*/bench/README.md", "packages/tr-all/examples/**README.md", "tests/*/README.md",
    "tools/site/reference/*.rst", "tools/site/groups/*.rst", "README.md", "CONTRIBUTING.md", "SECURITY.md",
    "CODE_OF_CONDUCT.md",
]  # fmt: skip
exclude_patterns = [".*", "build", "**/src", "**/node_modules"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
# Pages that begin with a heading of a lower level, or skip one, are as their readers on the disk have them.
suppress_warnings = ["myst.header"]

html_theme = "furo"
html_title = "tr"
html_logo = "static/logo.svg"
html_favicon = "static/logo.svg"
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]
html_copy_source = False
html_show_search_summary = False  # a browser does not let a page on the disk read the others
html_show_sphinx = False
html_show_copyright = False
html_last_updated_fmt = None

autodoc_default_options = {"members": True}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
WIDTHS = (4, 8, 14, 22, 32, 44)  # of a table's columns, in characters
INDENTED = re.compile(r"^(\S[^\n]*[^:\n]\n\n)(?=    \S)", re.MULTILINE)


def link_to_pages(app: Any, name: str, source: list[str]) -> None:
    """Turn links to folders, which a repository's page shows with their README, into links to that."""
    here = posixpath.dirname(name)

    def to_page(link: re.Match[str]) -> str:
        folder = ROOT / posixpath.normpath(posixpath.join(here, link[2]))
        return f"{link[1]}{link[2].rstrip('/')}/README.md{link[3]}" if folder.is_dir() else link[0]

    source[0] = LINK.sub(to_page, source[0])


def code_of_markdown(app: Any, kind: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    """Mark code in docstrings, which are Markdown, as reStructuredText does."""
    text = INDENTED.sub(r"\1::\n\n", "\n".join(lines))
    lines[:] = CODE.sub(r"``\1``\\ ", text).split("\n")


def only_first_level(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Leave the pages of a group to its own page: the sidebar has those that the home page names."""
    if whole := context.get("toctree"):
        context["toctree"] = lambda **given: whole(**{**given, "maxdepth": 1})


def size_columns(app: Any, doctree: Any, name: str) -> None:
    """Give each column of a table a class for the width that its texts need: site.css has the widths.

    A browser alone makes all columns of a wide table narrow, and so its rows high.
    """
    for group in doctree.findall(nodes.tgroup):
        rows = [list(row.findall(nodes.entry)) for row in group.findall(nodes.row)]
        for column in zip(*(row for row in rows if len(row) == group["cols"]), strict=True):
            longest = max(len(entry.astext()) for entry in column)
            width = next((width for width in WIDTHS if longest <= 3 * width), WIDTHS[-1])
            for entry in column:
                entry["classes"].append(f"wide-{width}")


def setup(app: Any) -> None:
    """Connect the above to Sphinx."""
    app.connect("html-page-context", only_first_level, priority=400)  # before the theme writes its sidebar
    app.connect("doctree-resolved", size_columns)
    app.connect("source-read", link_to_pages)
    app.connect("autodoc-process-docstring", code_of_markdown, priority=400)  # before napoleon reads its sections
