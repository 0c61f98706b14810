"""Sphinx configuration: ``sphinx-build -W docs docs/_build``."""

import os
import sys

sys.path.insert(0, os.path.abspath(".."))

import cuattn

project = "cuattn"
author = "cuattn contributors"
copyright = "2026, cuattn contributors"
version = release = cuattn.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "myst_parser",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "**/sg_execution_times.rst", "sg_execution_times.rst"]
templates_path = ["_templates"]
nitpicky = False

myst_heading_anchors = 3
autodoc_typehints = "none"  # the docstrings say more: shapes and dtypes
autosummary_generate = True
numpydoc_show_class_members = False  # the class's template lists them
numpydoc_xref_param_type = False

sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "download_all_examples": False,
    "show_memory": False,
    "write_computation_times": False,
    "min_reported_time": 60,
    "abort_on_example_error": True,
}

html_theme = "pydata_sphinx_theme"
html_title = "cuattn"
html_theme_options = {
    "show_nav_level": 1,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 7,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
}
html_sidebars = {"install": [], "tutorial": [], "semantics": [], "benchmarks": []}
html_static_path = ["_static"]
html_css_files = ["cuattn.css"]
html_copy_source = False
html_show_sourcelink = False
