import csv
import os
import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from tempfile import TemporaryDirectory

from docutils.nodes import SkipNode, math_block
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import pending_xref
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

sys.path.insert(0, str(Path(__file__).parent))

import generate

project = "calibrant"
author = "The calibrant developers"
copyright = "2026, The calibrant developers"
version = release = installed_version("calibrant")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
# No sphinx.ext.intersphinx: it downloads inventories, and the build must work without a network.

exclude_patterns = ["_build", "_generated", "_templates"]
templates_path = ["_templates"]
smartquotes_action = "qe"  # no dashes, which options begin with
myst_enable_extensions = ["amsmath", "attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_update_mathjax = False
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autosummary_generate = True
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = "calibrant"
pygments_dark_style = "github-dark"
html_logo = html_favicon = "_static/logo.svg"
html_theme_options = {
    "top_of_page_buttons": [],
    "light_css_variables": {"color-brand-primary": "#1d4f7c", "color-brand-content": "#1a5f9e"},
    "dark_css_variables": {"color-brand-primary": "#8fc1ee", "color-brand-content": "#7db6ea"},
}
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["formulas.css", "pages.css"]

# Formulas become MathML, which browsers draw themselves. The usual sphinx.ext.mathjax would make
# every reader fetch a script from the network, and imgmath needs LaTeX at build time.
# One trap of the converter: write \bar{c_b}, not \bar{c}_b, which puts the b below the c.
html_math_renderer = "mathml"


def _write_math(translator, node):
    block = isinstance(node, math_block)
    try:
        mathml = tex2mathml(node.astext(), as_block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("formula: %s", error, location=node)
        mathml = f"<code>{translator.encode(node.astext())}</code>"
    if block:
        number = f'<span class="eqno">({node["number"]})</span>' if node["number"] else ""
        tag = translator.starttag(node, "div", CLASS="math notranslate nohighlight")
        mathml = f"{tag}{number}{mathml}</div>\n"
    translator.body.append(mathml)
    raise SkipNode


FIGURE = re.compile(r"```python\n(.*?)```(?:\s*!\[[^\]]*\]\(images/(\w+)\.svg\))?", re.DOTALL)
"""Code of a page, and the name of the figure below it, if there is one."""


CIFAR_10 = [
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
]


def _draw_figures(app):
    """Draw the figures of the pages and write the report they show, so that they are up to date."""
    import matplotlib.pyplot as plt
    import numpy as np

    import calibrant
    from calibrant.show import figures

    folder = Path(app.srcdir) / "images"
    folder.mkdir(exist_ok=True)
    page, before = (Path(app.srcdir) / "report.md").read_text(encoding="utf-8"), os.getcwd()
    with TemporaryDirectory() as scratch:
        os.chdir(scratch)  # examples write files, and the report names the one it was made of
        try:
            with np.load(calibrant.sample_path()) as arrays:
                calibrant.save_predictions("predictions.npz", {**arrays, "class_names": CIFAR_10})
            report = calibrant.report("predictions.npz", title="ResNet-50 on CIFAR-10")
            report.save(Path(app.srcdir) / "_static/demo_report.html")
            _draw_gallery(page, folder)
        finally:
            os.chdir(before)
    for loss in ("ls", "mbls"):
        drawn = figures.gate_plot(_gate_log(app, f"fedlas_{loss}"))
        figures.save_figure(drawn, folder / f"gate_{loss}.svg")
    plt.close("all")


def _draw_gallery(page, folder):
    """Run the code of a page, and save what it draws under the names that the page uses."""
    import matplotlib.pyplot as plt

    from calibrant.show import figures

    variables = {}
    for code, name in FIGURE.findall(page):
        plt.close("all")
        exec(code, variables)
        if name:
            figures.save_figure(plt.gcf(), folder / f"{name}.svg")


def _gate_log(app, loss):
    """Rows of the first seed with a loss."""
    with (Path(app.srcdir) / "data" / "gate.csv").open(newline="") as file:
        wanted = {"network": "resnet18", "loss": loss, "seed": "0"}
        return [row for row in csv.DictReader(file) if wanted.items() <= row.items()]


def _find_reference(app, env, node, target):
    """Resolve a name that stands in another package than the page, if only one has it.

    Docstrings name neighbours in their module, but public names are documented where they are
    imported from: ``calibrant.conformal``, not ``calibrant.decide.conformal``.
    """
    wanted = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not wanted:
        return None
    entries = {
        (entry.docname, entry.node_id)
        for name, entry in env.domains["py"].objects.items()
        if name.rpartition(".")[2] == wanted.rpartition(".")[2]
        and entry.objtype in ("class", "function")
        and not entry.aliased
    }
    if len(entries) != 1:
        return None
    return make_refnode(app.builder, node["refdoc"], *entries.pop(), target, wanted)


def _drop_words(app, doctree):
    """Take no word of the type of a parameter for a reference, such as ``n`` for ``Threshold.n``.

    Classes begin with a capital letter.
    """
    for node in list(doctree.findall(pending_xref)):
        kind = node.get("refdomain"), node.get("reftype")
        if kind == ("py", "class") and re.fullmatch(r"[a-z_]\w*", node["reftarget"]):
            node.replace_self(node.children)


def _write_pages(app, config):
    """Write the pages that are made from the code, before Sphinx looks for pages."""
    generate.write(Path(app.srcdir))


def setup(app):
    app.connect("config-inited", _write_pages)
    app.connect("builder-inited", _draw_figures)
    app.connect("doctree-read", _drop_words)
    app.connect("missing-reference", _find_reference)
    app.add_html_math_renderer("mathml", (_write_math, None), (_write_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
