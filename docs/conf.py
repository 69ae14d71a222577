"""Sphinx configuration of the documentation site. `scripts/docs` builds it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs/_extensions")]

project = "Encore"
html_title = "Encore"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "reference_tables",
    "page_details",
]
exclude_patterns = ["_build", "_extensions"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["encore.css"]
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "literal"  # docstrings write `code` with one backquote

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 100  # a longer one has a line for each parameter
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
