"""Configuration of the site: Sphinx with MyST, furo and sphinx-gallery. `make docs` builds it, without a network."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]
os.environ.setdefault("MPLBACKEND", "agg")

import efcil  # noqa: E402

project = "efcil"
author = "The efcil authors"
copyright = f"2026, {author}"
version = release = efcil.__version__

extensions = [
    "mathml",
    "dark",
    "api",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "figures", "gallery_src", "**/*.py", "**/GALLERY_HEADER.rst", "**sg_execution_times.rst"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
default_role = "code"
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_block"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["misc.highlighting_failure"]

autodoc_typehints = "none"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "efcil"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"

sphinx_gallery_conf = {
    "examples_dirs": "gallery_src",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "abort_on_example_error": True,
    "show_memory": False,
    "ignore_repr_types": r"matplotlib\.(text|legend)",  # what the last line of a figure returns
    "show_signature": False,
    "download_all_examples": False,
    "min_reported_time": 10**6,
    "remove_config_comments": True,
}
