"""Sphinx: `make docs` writes docs/_build/html."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = "horovod-onebit"
author = "the horovod-onebit authors"
copyright = "2026, the horovod-onebit authors"
release = version = re.search(r'"(.+)"', (ROOT / "horovod_onebit" / "_version.py").read_text())[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"horovod-onebit {release}"
html_show_sphinx = False
# What the link check of `make docs-check` leaves to a machine with a network.
linkcheck_ignore = [r"https?://"]
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_js_files = ["tables.js"]
