"""The documentation site: ``make docs``."""

from importlib.metadata import version as version_of

project = "jax_baracuda"
version = release = version_of(project)
extensions = ["myst_parser", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["page.css"]
pygments_dark_style = "github-dark"
myst_heading_anchors = 4
smartquotes_action = "D"  # dashes; quoted messages and options are shown as they are typed
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
