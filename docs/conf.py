"""Settings of the documentation: `make docs` builds it, and warnings are errors."""

import importlib.metadata
import inspect
import os
import re
import shutil
from pathlib import Path

import emaopt
import emaopt.linen
import emaopt.nnx

HERE = Path(__file__).parent

project = "emaopt"
author = "The emaopt authors"
copyright = author
release = importlib.metadata.version("emaopt")
version = release

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", ".jupyter_cache"]
nitpicky = True

# Pages and notebooks are executed. What a kernel needs is in its environment: plots
# are drawn by the inline backend, in the style of docs/matplotlibrc.
os.environ.pop("MPLBACKEND", None)
os.environ["MATPLOTLIBRC"] = str(HERE / "matplotlibrc")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
nb_execution_mode = "force"
nb_execution_show_tb = True  # a cell that fails is a warning, and fails the build
nb_execution_timeout = 300
nb_merge_streams = True
suppress_warnings = ["mystnb.unknown_mime_type"]

# The notebooks of examples/ are pages too; Sphinx reads what is below docs/ only.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
(HERE / "notebooks").mkdir()
for path in sorted((HERE.parent / "examples").glob("*.ipynb")):
    shutil.copy(path, HERE / "notebooks")

myst_enable_extensions = []  # no dollars: formulas are text, and read without scripts
smartquotes_action = "D"  # dashes; quotes are code as often as not
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "sphinx_book_theme"
html_title = "emaopt"
html_static_path = ["_static"]
html_css_files = ["emaopt.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


# Words that name other things too: the update of a transformation, a key of a dict.
COMMON = ("corrected", "init", "schedules", "update")


def _public_names():
    """What a docstring may call by its short name, and where the reference has it."""
    names = {name: f"emaopt.{name}" for name in emaopt.__all__ if name not in COMMON}
    for module in (emaopt.linen, emaopt.nnx):
        # Not `update_batch_stats`, which both of them have.
        for name in ("TrainState", "EMA", "EmaVariable", "eval_model"):
            if hasattr(module, name):
                names[name] = f"{module.__name__}.{name}"
    return names


NAMES = _public_names()


def _as_restructured_text(what, name, obj, lines):
    """Writes docstrings, which are plain text, as Sphinx reads it.

    The formula after the first line gets a block of its own, public names become
    links, and |x| is no substitution.
    """
    if what == "property":
        # Napoleon takes what is before a colon for a type.
        lines = [*inspect.getdoc(obj).split("\n"), ""]

    def escaped(found):
        if found[0] == "|":
            return r"\|"
        target = NAMES.get(found[1], name)
        linked = found[0] if target == name else f":py:obj:`~{target}`"
        # A word may follow: ``x``s.
        return linked + (r"\ " if found[2] else "")

    paragraphs = [
        part
        if part.lstrip().startswith(">>>")
        else re.sub(r"``(.+?)``(?=(\w?))|\|", escaped, part, flags=re.DOTALL)
        for part in "\n".join(lines).split("\n\n")
    ]
    formula = len(paragraphs) > 1 and not re.match(r"[:.>]", paragraphs[1].lstrip())
    if what in ("function", "class", "method") and formula:
        block = paragraphs[1].replace("\n", "\n   ")
        if re.search(r"[=·/(]", block):
            paragraphs[1] = f".. container:: formula\n\n   {block}"
    return "\n\n".join(paragraphs).split("\n")


def _process(app, what, name, obj, options, lines):
    lines[:] = _as_restructured_text(what, name, obj, lines)


def _signature(app, what, name, obj, options, signature, returned):
    if what == "class" and name == "emaopt.nnx.EMA":
        # The metaclass of nnx hides it.
        given = inspect.signature(obj.__init__).parameters.values()
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in given]
        return str(inspect.Signature(plain[1:])), returned
    return None


def setup(app):
    app.connect("autodoc-process-signature", _signature)
    # After napoleon, which has a priority of 500.
    app.connect("autodoc-process-docstring", _process, priority=800)


# Nothing outside is looked up while building: the reference links to itself alone.
nitpick_ignore_regex = [
    ("py:.*", r"(Assertion|Lookup|Type|Value|Import|Attribute)Error"),
    ("py:.*", r"(jax|optax|flax|nnx|numpy|pandas|chex)\..*"),
]
