"""The documentation site: ``make docs``."""

from importlib.metadata import version as version_of

project = "jax_baracuda"
version = release = version_of(project)
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = project
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["width.css"]
pygments_dark_style = "github-dark"
myst_heading_anchors = 4
smartquotes_action = "D"  # dashes; quoted messages and options are shown as they are typed
autodoc_typehints = "none"  # the descriptions of arguments have shapes and dtypes
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"  # the description of one attribute goes on from the last
napoleon_use_rtype = False
