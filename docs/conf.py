"""Sphinx configuration: ``sphinx-build docs docs/_build``."""

import cuattn

project = "cuattn"
author = "cuattn contributors"
copyright = "2026, cuattn contributors"
version = release = cuattn.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "numpydoc",
    "myst_parser",
]
myst_enable_extensions = ["dollarmath"]
autodoc_typehints = "none"  # the docstrings say more: shapes and dtypes
autosummary_generate = True
numpydoc_show_class_members = False
exclude_patterns = ["_build"]
html_theme = "alabaster"
nitpicky = False
