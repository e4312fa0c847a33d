"""Formulas of the site as MathML, which browsers show by themselves: pages need no script and no network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def write_inline(translator: Any, node: nodes.math) -> None:
    """Write a formula within a sentence."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def write_block(translator: Any, node: nodes.math_block) -> None:
    """Write a formula on lines of its own."""
    translator.body.append(f'<div class="math-block">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Let Sphinx write formulas by the functions above."""
    app.add_html_math_renderer("mathml", inline_renderers=(write_inline, None), block_renderers=(write_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
