"""The pictures and the table of `docs/scaling.md`, from the result of `benchmarks/scaling.py`; needs chromium.

    python benchmarks/scaling_plots.py

Writes docs/images/scaling_*.png and prints the table in Markdown.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.subplots import make_subplots

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/scaling.json"
IMAGES = ROOT / "docs/images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars --virtual-time-budget=5000"
)
MODELS = ("7B", "70B + 7B")
STUDIES = {"strong": "#0072b2", "weak": "#d55e00"}
PARTS = {
    "actor_generate": ("actor generate", "#0072b2"),
    "actor_train_step": ("actor train", "#d55e00"),
    "critic_train_step": ("critic train", "#e69f00"),
    "ref_inference": ("reference inference", "#009e73"),
    "reward_inference": ("reward inference", "#56b4e9"),
    "critic_inference": ("critic inference", "#cc79a7"),
    "reallocation": ("reallocation", "#000000"),
    "data transfer": ("data transfer", "#7a5c3e"),
    "idle": ("idle", "#c4c4c4"),
}

Rows = Sequence[dict[str, Any]]


def of(rows: Rows, study: str, models: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["study"], row["models"]) == (study, models)]


def tokens_figure(rows: Rows) -> go.Figure:
    """tokens/s, and tokens/s a device, over devices."""
    titles = [f"{models}: {what}" for what in ("tokens/s", "tokens/s a device") for models in MODELS]
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, vertical_spacing=0.13, horizontal_spacing=0.08)
    for column, models in enumerate(MODELS, 1):
        for study, colour in STUDIES.items():
            feasible = [row for row in of(rows, study, models) if row["value"]]
            for key, name, dash in (("value", "searched", "solid"), ("baseline", "heuristic", "dot")):
                shown = [row for row in feasible if row[key]]
                style: dict[str, Any] = {
                    "x": [row["devices"] for row in shown],
                    "mode": "lines+markers",
                    "name": f"{study} scaling, {name}",
                    "legendgroup": study + name,
                    "line": {"color": colour, "dash": dash},
                    "marker": {"symbol": "circle" if key == "value" else "circle-open", "size": 7},
                }
                figure.add_scatter(**style, y=[row[key] for row in shown], row=1, col=column, showlegend=column == 1)
                per_device = [row[key] / row["devices"] for row in shown]
                figure.add_scatter(**style, y=per_device, row=2, col=column, showlegend=False)
        for row in of(rows, "weak", models):
            if not row["value"]:
                figure.add_annotation(
                    x=math.log10(row["devices"]), y=0.5, yref=f"y{2 + column} domain", text="does not fit",
                    textangle=-90, showarrow=False, row=2, col=column,
                )  # fmt: skip
    devices = sorted({row["devices"] for row in rows if row["study"] == "strong"})
    figure.update_xaxes(type="log", tickvals=devices, ticktext=[f"{n:,}" for n in devices], range=[0.8, 3.12])
    figure.update_yaxes(type="log", dtick=1, minor={"dtick": "D1", "showgrid": True}, tickformat="~s", row=1)
    figure.update_yaxes(rangemode="tozero", tickformat=",", row=2)
    figure.update_xaxes(title="devices (H100)", row=2)
    return _styled(figure, height=760)


def shares_figure(rows: Rows) -> go.Figure:
    """Parts of device time of the searched plans over devices."""
    cells = [(models, study) for models in MODELS for study in STUDIES]
    titles = [f"{models}, {study} scaling" for models, study in cells]
    figure = make_subplots(
        rows=2, cols=2, subplot_titles=titles, shared_yaxes=True, vertical_spacing=0.13, horizontal_spacing=0.04
    )
    for i, (models, study) in enumerate(cells):
        chosen = of(rows, study, models)
        _stack(figure, chosen, [f"{row['devices']:,}" for row in chosen], i // 2 + 1, i % 2 + 1, legend=not i)
    figure.update_xaxes(title="devices (H100)", row=2)
    return _styled(figure, height=800)


def context_figure(rows: Rows) -> go.Figure:
    """tokens/s, and parts of device time, over the length of the context."""
    titles = [f"{models}: {what}" for what in ("tokens/s", "searched plan, device time") for models in MODELS]
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, vertical_spacing=0.13, horizontal_spacing=0.08)
    for column, models in enumerate(MODELS, 1):
        chosen = of(rows, "context", models)
        contexts = [f"{row['context']:,}" for row in chosen]
        for key, name, colour in (("value", "searched", "#404040"), ("baseline", "heuristic", "#b0b0b0")):
            figure.add_bar(
                x=contexts, y=[row[key] for row in chosen], name=name, marker_color=colour, offsetgroup=key,
                text=[f"{row[key]:,.0f}" if row[key] else "does not fit" for row in chosen], textposition="auto",
                row=1, col=column, showlegend=column == 1,
            )  # fmt: skip
        _stack(figure, chosen, contexts, 2, column, legend=column == 1)
    figure.update_yaxes(tickformat="~s", row=1)
    figure.update_xaxes(title="tokens of a sample, prompt and response", row=2)
    return _styled(figure, height=760)


def _stack(figure: go.Figure, chosen: Rows, x: list[str], row: int, column: int, *, legend: bool) -> None:
    """Stacked bars of the shares; a point without a plan says so."""
    base = [0.0] * len(chosen)
    for part, (name, colour) in PARTS.items():
        shares = [point["searched"].get("shares", {}).get(part, 0.0) for point in chosen]
        figure.add_bar(
            x=x, y=shares, base=list(base), name=name, marker_color=colour, offsetgroup="shares", legendgroup=name,
            row=row, col=column, showlegend=legend,
        )  # fmt: skip
        base = [b + share for b, share in zip(base, shares, strict=True)]
    for position, point in enumerate(chosen):  # by position: a category that looks like a number would be taken for one
        if not point["value"]:
            figure.add_annotation(
                x=position, y=0.5, text="does not fit", textangle=-90, showarrow=False, row=row, col=column
            )
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=x, tickangle=0, row=row, col=column)
    figure.update_yaxes(tickformat=".0%", range=[0, 1], row=row, col=column)


def _styled(figure: go.Figure, height: int) -> go.Figure:
    legend = {"orientation": "h", "y": -0.12, "x": 0.5, "xanchor": "center", "yanchor": "top"}
    return figure.update_layout(
        template="plotly_white",
        width=1000,
        height=height,
        margin={"l": 60, "r": 20, "t": 40, "b": 120},
        font={"size": 13, "color": "#202020"},
        legend=legend,
    )


def table(rows: Rows) -> Iterator[str]:
    """The numbers in Markdown: points, tokens/s of both plans, and shares of the searched one in percent."""
    names = [name for name, _ in PARTS.values()]
    heads = ["scaling", "devices", "batch", "context", "searched tokens/s", "heuristic", "ratio", "gap", *names]
    for models in MODELS:
        yield f"\n{models}:\n"
        yield "| " + " | ".join(heads) + " |"
        yield "|---" * len(heads) + "|"
        for study in (*STUDIES, "context"):
            for row in of(rows, study, models):
                yield "| " + " | ".join(_cells(row)) + " |"


def _cells(row: dict[str, Any]) -> list[str]:
    point = [row["study"], f"{row['devices']:,}", f"{row['batch_size']:,}", f"{row['context']:,}"]
    if not row["value"]:
        return [*point, "does not fit", "does not fit", *["-"] * (2 + len(PARTS))]
    heuristic = f"{row['baseline']:,.0f}" if row["baseline"] else "does not fit"
    ratio = f"{row['ratio']:.2f}" if row["baseline"] else "-"
    searched = row["searched"]
    shares = [f"{100 * searched['shares'][part]:.1f}" for part in PARTS]
    return [*point, f"{row['value']:,.0f}", heuristic, ratio, f"{100 * searched['gap']:.0f} %", *shares]


def draw(figure: go.Figure, path: Path) -> None:
    """The figure as a PNG file, drawn by a browser without a window."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit("no browser found; on Debian install one with: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        html = plotly.io.to_html(figure, include_plotlyjs=True, config={"staticPlot": True})
        page.write_text(html.replace("<body>", '<body style="margin:0">'))
        size = f"--window-size={figure.layout.width},{figure.layout.height}"
        words = [*OPTIONS.split(), f"--user-data-dir={folder}/profile", size, f"--screenshot={path}", page.as_uri()]
        subprocess.run([browser, *words], check=True, capture_output=True, timeout=120)


def main() -> None:
    rows = json.loads(RESULT.read_text())["results"]
    IMAGES.mkdir(exist_ok=True)
    draw(tokens_figure(rows), IMAGES / "scaling_tokens.png")
    draw(shares_figure(rows), IMAGES / "scaling_shares.png")
    draw(context_figure(rows), IMAGES / "scaling_context.png")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
