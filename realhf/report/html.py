"""HTML from the files of `templates/`: pages in one file, readable without a network. Every text is escaped."""

import base64
import gzip
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.io import to_json
from plotly.offline import get_plotlyjs

from realhf.report.figures import curves_figure

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.globals["curves_figure"] = curves_figure
# What becomes JSON are figures. No text in it ends the script around it.
_TEMPLATES.policies |= {"json.dumps_function": to_json, "json.dumps_kwargs": {"validate": False}}
# Python's base 85, but for the characters that mean something in HTML.
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%,()*+-;:=.?@^_`{|}~"
_TO_ALPHABET = bytes.maketrans(b"<>&", b":.,")


def document(template: str, **values: Any) -> str:
    """A page that holds its style, its scripts and plotly, and loads nothing; `title` is among its values."""
    # plotly.js in base 85 of gzip: 1.9 of its 4.8 MB. In base 64 it would take 2.0.
    packed = gzip.compress(get_plotlyjs().encode(), mtime=0)
    text = base64.b85encode(packed, pad=True).translate(_TO_ALPHABET).decode()
    return str(part(template, plotly={"alphabet": ALPHABET, "size_bytes": len(packed), "text": text}, **values))


def part(template: str, **values: Any) -> Markup:
    """A template with its values, as HTML that other templates may hold."""
    return Markup(_TEMPLATES.get_template(template).render(values))
