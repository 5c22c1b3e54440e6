"""This module writes the report's HTML: skeleton, style, tables, pictures. Everything that is not markup here is escaped."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbcnn.files import regular
from nbcnn.lab.report.origin import origin

PALETTE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c1e21; --muted: #5c6470; --line: #d9dde3; --card: #f4f6f8;
  --c1: #0072b2; --c2: #c4500a; --c3: #00805c; --c4: #8f4a86; --c5: #737a84; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e6e8eb; --muted: #9aa3ae; --line: #343a42; --card: #1e2329;
  --c1: #56b4e9; --c2: #f0894a; --c3: #35c79a; --c4: #d592cb; --c5: #9aa3ae; } }
"""
CHARTS = """svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
svg .muted { fill: var(--muted); }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2; }
.s1 { stroke: var(--c1); fill: var(--c1); } .s2 { stroke: var(--c2); fill: var(--c2); } .s3 { stroke: var(--c3); fill: var(--c3); }
.s4 { stroke: var(--c4); fill: var(--c4); } .s5 { stroke: var(--c5); fill: var(--c5); }
svg .hollow { fill: var(--paper); } svg .dash { stroke-dasharray: 5 4; }
"""
STYLE = (
    PALETTE
    + """* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .5rem 0; }
#headline h2 { border-top: 0; margin-top: .4rem; padding-top: 0; }
nav ul { columns: 20rem; column-gap: 2rem; list-style: none; margin: 1rem 0; padding: .7rem .9rem; background: var(--card); border-radius: .5rem;
  font-size: .9rem; }
nav li { break-inside: avoid; }
nav span { color: var(--muted); }
a { color: var(--c1); }
code, pre { font: .85em/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre { background: var(--card); padding: .7rem; border-radius: .4rem; white-space: pre-wrap; margin: .5rem 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .7rem; margin: 1rem 0; }
.card { background: var(--card); border-radius: .5rem; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.45rem; line-height: 1.2; }
.card span, .from, figcaption { color: var(--muted); font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--muted); font-weight: 600; }
td.word, th.word { text-align: left; }
td.long { text-align: left; white-space: normal; }
td.share { background: color-mix(in srgb, var(--c1) calc(var(--s) * 70%), transparent); text-align: center; min-width: 2.6rem; }
figure { margin: 1rem 0; max-width: 38rem; }
svg, img { display: block; width: 100%; height: auto; }
img { background: #ffffff; border-radius: .4rem; }
"""
    + CHARTS
    + """@media print { body { max-width: none; } nav { display: none; } }
"""
)


def escape(text: Any) -> str:
    """Text as HTML, safe between tags and in quoted attributes."""
    return html.escape(str(text), quote=True)


def marked(text: Any) -> str:
    """Text with Markdown's marks for code and for what is bold, as HTML: escaped first, so that nothing else becomes markup."""
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text)))


def page(title: str, below: str, sections: Sequence[tuple[str, str, str, str]], source: str) -> str:
    """The whole file. `sections` are (id, title, what the contents say about it, HTML), the first of them the summary, above the contents;
    `below` stands under the title and `source` at the end, both plain text.
    """
    links = "".join(f'<li><a href="#{name}">{escape(head)}</a> <span>{escape(about)}</span></li>' for name, head, about, _ in sections)
    summary, *rest = (f'<section id="{name}">\n<h2>{escape(head)}</h2>\n{content}\n</section>' for name, head, _, content in sections)
    body = "\n".join(rest)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{escape(below)}</p>
</header>
<main>
{summary}
<nav aria-label="contents"><ul>{links}</ul></nav>
{body}
</main>
<footer>
<p class="from">{escape(source)}</p>
</footer>
</body>
</html>
"""


def cards(facts: Sequence[tuple[str, str]]) -> str:
    """Figures that meet the eye: (figure, what it is)."""
    return '<div class="cards">' + "".join(f'<div class="card"><b>{escape(v)}</b><span>{escape(what)}</span></div>' for v, what in facts) + "</div>"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], words: int = 1) -> str:
    """A table that scrolls sideways where it is wider than the screen; the first `words` columns are text.

    None is an empty cell; a column of nothing else is left out.
    """
    kept = [at for at in range(len(head)) if at < words or any(row[at] is not None for row in rows)]
    head, rows = [head[at] for at in kept], [[row[at] for at in kept] for row in rows]

    def cell(tag: str, at: int, value: Any) -> str:
        return f'<{tag} class="word">{_cell(value)}</{tag}>' if at < words else f"<{tag}>{_cell(value)}</{tag}>"

    top = "".join(cell("th", at, name) for at, name in enumerate(head))
    lines = ["<tr>" + "".join(cell("td", at, value) for at, value in enumerate(row)) + "</tr>" for row in rows]
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _cell(value: Any) -> str:
    return "" if value is None else marked(value)


def pairs(rows: Sequence[tuple[str, Any]]) -> str:
    """A table of names and texts that may be long."""
    lines = "".join(f'<tr><th class="word">{escape(name)}</th><td class="long">{escape(value)}</td></tr>' for name, value in rows)
    return f'<div class="scroll"><table><tbody>{lines}</tbody></table></div>'


def confusion(counts: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """A confusion matrix, rows true and columns predicted classes, shaded by the share of the true class."""
    top = "".join(f"<th>{at}</th>" for at in range(len(names)))
    lines = []
    for at, (name, row) in enumerate(zip(names, counts, strict=True)):
        total = max(1, sum(row))
        cells = "".join(f'<td class="share" style="--s:{count / total:.3f}">{count}</td>' for count in row)
        lines.append(f'<tr><th class="word">{escape(name if name == str(at) else f"{at} {name}")}</th>{cells}<td>{row[at] / total:.1%}</td></tr>')
    head = f'<tr><th class="word">true class</th>{top}<th>right</th></tr>'
    return f'<div class="scroll"><table class="confusion"><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table></div>'


def figure(picture: str, caption: str) -> str:
    """A picture (SVG or `png`) with its caption."""
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def png(path: Path, alt: str) -> str:
    """A PNG file as an embedded picture. Raises OSError if it cannot be read."""
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(regular.read(path)).decode()}">'


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    """A heading inside a section."""
    return f"<h3>{escape(text)}</h3>"


def folded(title: str, content: str) -> str:
    """HTML that opens when its title is touched."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def code(text: str) -> str:
    """A command to copy."""
    return f"<pre>{escape(text)}</pre>"


def provenance(environment: dict[str, Any]) -> str:
    """The line below a table that says where it is from."""
    return f'<p class="from">{marked(origin(environment))}</p>'
