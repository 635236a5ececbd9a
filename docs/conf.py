"""Sphinx configuration: API pages from the docstrings, notebooks executed."""

project = "dataeff_jax"
author = "the dataeff_jax authors"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_title = "dataeff_jax"
exclude_patterns = ["jupyter_execute", "_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = True
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
myst_enable_extensions = ["dollarmath", "colon_fence"]
