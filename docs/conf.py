"""Configuration of Sphinx; ``make docs`` builds the site in docs/_build."""

import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # the package next to these pages, whether it is installed or not

import synkhronos

project = "Synkhronos"
author = "The Synkhronos developers"
project_copyright = "The Synkhronos developers"
version = release = synkhronos.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Synkhronos"
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3  # so that pages can link to headings, as on a forge

napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False  # a type such as "variable" must not become a link to an object of that name
autodoc_typehints = "none"  # docstrings have more detailed types
autodoc_preserve_defaults = True
default_role = "code"  # of `name` in docstrings
