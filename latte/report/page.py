"""Self-contained HTML files from the assets: style, scripts and data are inlined."""

from __future__ import annotations

import html
import re
from importlib import resources
from typing import Any

from latte import __version__
from latte.report.encode import embed, encode_inspection
from latte.report.inspection import Inspection

SHARED = ("core.js", "chart.js", "heat.js", "inspector.js")


def render_page(title: str, kicker: str, lead: str, footer: str, data: Any, script: str) -> str:
    """Fill in the page template; ``footer`` is HTML, the other strings are plain text."""
    scripts = "\n".join(f"<script>\n{_asset(name)}</script>" for name in (*SHARED, script))
    parts = {
        "version": __version__,
        "title": html.escape(title),
        "kicker": html.escape(kicker),
        "lead": html.escape(lead),
        "footer": footer,
        "style": _asset("page.css"),
        "data": embed(data),
        "scripts": scripts,
    }
    # In one pass, so that braces in the data are not substituted.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def render_inspection(inspection: Inspection) -> str:
    """The page of an inspection: attention weights of a chosen layer, head and token, by position and latent."""
    tokens = len(inspection.tokens)
    lead = (
        f"{tokens} tokens, {len(inspection.layers)} layers. Choose a token to see which positions it attends to: "
        "the stronger the shade, the larger the weight. Arrow keys move the choice."
    )
    if inspection.reason is not None:
        lead = f"{tokens} tokens, {len(inspection.layers)} layers."
    if inspection.dropped:
        lead += f" The text was cut: {inspection.dropped} more tokens are not shown."
    return render_page(
        inspection.title or "What the model attends to",
        "Latte inspector",
        lead,
        f"<p>Made by latte {__version__}.</p>",
        encode_inspection(inspection),
        "inspect.js",
    )


def _asset(name: str) -> str:
    return resources.files("latte.report").joinpath("assets", name).read_text(encoding="utf-8")
