"""Configuration of the documentation: `make docs` builds it into build/docs, with warnings as errors."""

from __future__ import annotations

import gc
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

gc.disable()  # a build holds nearly all that it makes: looking through it again and again is a sixth of its time

project = "levattn"
author = "The levattn contributors"
release = version = metadata.version("levattn")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "mathml",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
html_math_renderer = "mathml"
smartquotes = False  # quotes in code are code
exclude_patterns = ["**/GALLERY_HEADER.rst"]
default_role = "autolink"  # `universal_set` in a docstring links to it where it is a name, and is text elsewhere

# One page for each name, with its members; numpydoc would list the members a second time.
autosummary_generate = True
autosummary_filename_map = {  # file systems may not tell them from the functions of the same letters
    "levattn.Sensitivities": "levattn.Sensitivities-class",
    "levattn.datasets.Planted": "levattn.datasets.Planted-class",
}
autodoc_typehints = "none"  # the docstrings tell the types
autodoc_mock_imports = ["kvpress", "timm"]  # their adapters have pages without them
templates_path = ["_templates"]
numpydoc_show_class_members = False

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "filename_pattern": "/plot_",
    "backreferences_dir": "gallery/backreferences",
    "doc_module": ("levattn",),
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "show_memory": False,
    "write_computation_times": False,  # a page of its own, with scripts from elsewhere
    "min_reported_time": 0,
    "capture_repr": (),
    "reset_modules": ("matplotlib", "gallery_order.keep"),
    "within_subsection_order": "gallery_order.MainUsesFirst",
}

# A prompt is not copied with the code behind it.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "levattn"
html_static_path = ["_static"]
html_css_files = ["levattn.css"]
html_show_sourcelink = False
html_sidebars = {page: [] for page in ("index", "start", "program", "comparison", "design")}  # which have no siblings
html_theme_options = {
    "logo": {"text": "levattn"},
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 7,
    "show_prev_next": False,
    "footer_start": ["copyright"],
    "footer_end": [],
}
