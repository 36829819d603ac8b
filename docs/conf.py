"""The settings of Sphinx for the site of these pages: `python scripts/guide.py build`."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

project = "Mesh Transformer JAX, rebuilt"
html_title = "Mesh Transformer JAX"
author = "the contributors"
copyright = "the contributors. Apache License 2.0"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.mermaid",
    "site_extension",
]

myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath", "html_image"]
# `$195` is a price
myst_dmath_allow_digits = False
myst_dmath_allow_space = False
# the anchors of headings that the pages use, as GitHub makes them
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
# commands stand in indented blocks
highlight_language = "bash"

# `scripts/guide.py build` sets "cache", with the outputs that it has stored
nb_execution_mode = "off"
exclude_patterns = ["guide/outputs"]
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
# warnings of packages speak of the machine that builds the site
nb_output_stderr = "remove"

add_module_names = False
autodoc_member_order = "groupwise"
autodoc_typehints_format = "short"
# types of other packages, whose documentation is not at hand without a network
nitpick_ignore_regex = [("py:.*", ".*")]

html_theme = "sphinx_book_theme"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,
    "navbar_persistent": [],
}
copybutton_prompt_text = "$ "
