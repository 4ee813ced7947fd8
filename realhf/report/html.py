"""The parts of an HTML page in one file, readable without a network."""

import base64
import gzip
from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

# The browser is told to load nothing from anywhere.
CONTENT_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

STYLE = """
:root { color-scheme: light }
* { box-sizing: border-box }
body { margin: 0; background: #f4f5f7; color: #24292f }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 60px }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 18px; margin: 0 0 4px }
p { margin: 4px 0 10px } .muted { color: #6a737d } .path { font-size: 13px; overflow-wrap: anywhere }
section { background: white; border: 1px solid #e3e6ea; border-radius: 10px; padding: 18px 22px; margin-top: 18px }
.title { display: flex; gap: 14px; align-items: center; flex-wrap: wrap }
.state { border-radius: 999px; padding: 2px 14px; font-weight: 600; font-size: 14px; background: #e3e6ea }
.state.done { background: #d9f2e3; color: #17663c }
.state.running, .state.starting { background: #dbe8fb; color: #1d4f91 }
.state.failed { background: #fbdedb; color: #9a2318 } .state.interrupted { background: #fdecd2; color: #8a5300 }
.facts { display: flex; flex-wrap: wrap; gap: 12px 44px; margin-top: 16px }
.facts div { min-width: 90px } .facts b { display: block; font-size: 21px; font-weight: 600; line-height: 1.3 }
.facts span { color: #6a737d; font-size: 13px }
pre { background: #f6f7f9; border-radius: 6px; padding: 12px; font-size: 13px; line-height: 1.45 }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
pre.failure { background: #fdf1f0; border-left: 4px solid #d1483a; max-height: 340px; overflow-y: auto }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; margin: 8px 0 }
th, td { padding: 5px 22px 5px 0; text-align: right; border-bottom: 1px solid #eceef1; white-space: nowrap }
th { color: #6a737d; font-weight: 500 } th:first-child, td:first-child { text-align: left }
table.words td:last-child { text-align: left; white-space: normal; overflow-wrap: anywhere }
summary { cursor: pointer; color: #1d4f91; margin-top: 6px }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px }
.total td { font-weight: 600 }
select { font: inherit; padding: 3px 8px } .sample { margin: 14px 0 } .sample b { font-size: 14px }
.sample pre { margin: 4px 0; unicode-bidi: isolate } pre.prompt { background: white; border: 1px solid #e3e6ea }
"""

# Unpacks plotly, runs it, and draws the figures. One inside a closed <details> has no size until it is opened.
SCRIPT = """
function bytes(element) {  // of base 85: five characters have four bytes
  const text = element.textContent, values = new Uint8Array(128);
  [...element.dataset.alphabet].forEach((character, value) => values[character.charCodeAt(0)] = value);
  const view = new DataView(new ArrayBuffer(text.length / 5 * 4));
  for (let i = 0; i < text.length; i += 5) {
    let value = 0;
    for (let j = i; j < i + 5; j++) value = value * 85 + values[text.charCodeAt(j)];
    view.setUint32(i / 5 * 4, value);
  }
  return new Uint8Array(view.buffer, 0, element.dataset.size);
}
async function draw() {
  const packed = bytes(document.getElementById("plotly"));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(unpacked).text();
  document.head.append(library);
  document.querySelectorAll(".figure").forEach(figure => {
    const {data, layout} = JSON.parse(figure.nextElementSibling.textContent);
    Plotly.newPlot(figure, data, layout, {responsive: true, displayModeBar: false});
    figure.closest("details")?.addEventListener("toggle", () => Plotly.Plots.resize(figure));
  });
}
document.querySelectorAll("select.chooser").forEach(select => {
  const choose = () => [...select.closest("section").querySelector(".chosen").children].forEach(
    (part, i) => part.hidden = i !== select.selectedIndex);
  select.addEventListener("input", choose);
  choose();  // a page that is loaded again keeps the choice
});
draw().catch(error => document.querySelectorAll(".figure").forEach(
  figure => figure.textContent = `The figures need a browser of 2023 or later (${error}).`));
"""


def document(title: str, sections: Sequence[str]) -> str:
    """A page that holds its style, its scripts and plotly, and loads nothing."""
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style></head><body><main>",
            *sections,
            f"</main>{_packed_plotly()}",
            f"<script>{SCRIPT}</script></body></html>\n",
        ]
    )


# Python's base 85, but for the characters that mean something in HTML.
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%,()*+-;:=.?@^_`{|}~"
_TO_ALPHABET = bytes.maketrans(b"<>&", b":.,")


def _packed_plotly() -> str:
    """plotly.js in base 85 of gzip: 1.9 of its 4.8 MB. In base 64 it would take 2.0."""
    packed = gzip.compress(get_plotlyjs().encode(), mtime=0)
    text = base64.b85encode(packed, pad=True).translate(_TO_ALPHABET).decode()
    of = f'type="application/gzip" data-alphabet="{ALPHABET}" data-size="{len(packed)}"'
    return f'<script id="plotly" {of}>{text}</script>'


def section(title: str, *body: str) -> str:
    """A part of the page; `body` is HTML."""
    return "\n".join([f"<section><h2>{escape(title)}</h2>", *body, "</section>"])


def table(header: Sequence[str], rows: Sequence[Sequence[str]], style: str = "", has_total: bool = False) -> str:
    """A table of plain texts; with `has_total` the last row stands out."""
    lines = [f'<div class="scroll"><table class="{style}">']
    if header:
        lines.append("<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>")
    for index, row in enumerate(rows):
        mark = ' class="total"' if has_total and index == len(rows) - 1 else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return "\n".join([*lines, "</table></div>"])


def figure_html(figure: go.Figure) -> str:
    """The figure as a part of a `document`, whose script draws it."""
    content = str(figure.to_json()).replace("<", "\\u003c")  # no text in it ends the script
    return f'<div class="figure"></div><script type="application/json">{content}</script>'
