"""Small pictures as SVG text, the same for the same numbers: lines, bars and a timeline."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 900, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 210, 40, 70  # margins; the legend is in the right one
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#7a5c3e", "#000000")
GREY = "#c4c4c4"


@dataclass
class Axis:
    """Maps values from `low` to `high` onto pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / ((high - low) or 1) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round numbers within the axis."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            each = (1,) if len(powers) > 3 else (1, 2, 5)
            return [m * 10.0**p for p in powers for m in each if self.low <= m * 10.0**p <= self.high * 1.000001]
        rough = (self.high - self.low) / 6 or 1
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def text(x: float, y: float, words: str, *, anchor: str = "middle", size: int = 12, turned: float = 0) -> str:
    turn = f' transform="rotate({turned:g} {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{turn}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = "#d8d8d8") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" fill="{colour}" '
        'stroke="white" stroke-width="0.5"/>'
    )


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


@dataclass(kw_only=True)
class Picture:
    """The frame: title, axes, legend. Names get colours in the order in which they come."""

    title: str
    names: list[str] = field(default_factory=list)

    def colour(self, name: str) -> str:
        if name not in self.names:
            self.names.append(name)
        return GREY if name == "idle" else COLOURS[self.names.index(name) % len(COLOURS)]

    def write(self, path: Path) -> None:
        body = [*self.drawn(), *self._legend()]
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            'font-family="Helvetica, Arial, sans-serif" fill="#202020">'
        )
        background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        title = text(LEFT, 22, self.title, anchor="start", size=15)
        path.parent.mkdir(parents=True, exist_ok=True)  # what is drawn may have been measured for an hour
        path.write_text("\n".join([head, background, title, *body, "</svg>"]) + "\n")

    def drawn(self) -> Iterator[str]:
        raise NotImplementedError

    def _legend(self) -> Iterator[str]:
        for i, name in enumerate(self.names):
            y = TOP + 10 + 20 * i
            yield box(WIDTH - RIGHT + 15, y - 10, 12, 12, self.colour(name))
            yield text(WIDTH - RIGHT + 33, y, name, anchor="start")

    def _vertical(self, axis: Axis, name: str) -> Iterator[str]:
        for tick in axis.ticks:
            y = axis.at(tick)
            yield line(LEFT, y, WIDTH - RIGHT, y)
            yield text(LEFT - 6, y + 4, number(tick), anchor="end")
        yield text(16, (TOP + HEIGHT - BOTTOM) / 2, name, turned=-90)

    def _horizontal(self, axis: Axis, name: str, ticks: Sequence[float] = ()) -> Iterator[str]:
        for tick in ticks or axis.ticks:
            x = axis.at(tick)
            yield line(x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 5, "#202020")
            yield text(x, HEIGHT - BOTTOM + 18, number(tick))
        yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, name)


@dataclass(kw_only=True)
class Lines(Picture):
    """Points joined by lines, a line for each name; points without a value are left out."""

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, name: str, points: Sequence[tuple[float, float | None]]) -> None:
        self.colour(name)
        self.lines.setdefault(name, []).extend((x, y) for x, y in points if y is not None)

    def drawn(self) -> Iterator[str]:
        points = [point for each in self.lines.values() for point in each]
        assert points, f"{self.title}: nothing to draw"
        xs, ys = zip(*points, strict=True)
        low_y = min(ys) if self.log_y or min(ys) > 0.8 * max(ys) else 0.0
        across = Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, self.log_x)
        up = Axis(low_y, 1.05 * max(ys), HEIGHT - BOTTOM, TOP, self.log_y)
        yield from self._vertical(up, self.y)
        values = sorted(set(xs))
        yield from self._horizontal(across, self.x, values if len(values) <= 8 else ())
        for name, each in self.lines.items():
            places = [(across.at(x), up.at(y)) for x, y in each]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            yield f'<polyline points="{path}" fill="none" stroke="{self.colour(name)}" stroke-width="2"/>'
            for x, y in places:
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{self.colour(name)}"/>'


@dataclass(kw_only=True)
class Bars(Picture):
    """Groups of bars, side by side or one upon the other; a missing one is a cross."""

    axis: str
    stacked: bool = False
    groups: dict[str, dict[str, float | None]] = field(default_factory=dict)

    def add(self, group: str, name: str, value: float | None) -> None:
        self.colour(name)
        self.groups.setdefault(group, {})[name] = value

    def drawn(self) -> Iterator[str]:
        values = [[v or 0.0 for v in bars.values()] for bars in self.groups.values()]
        high = max((sum(each) if self.stacked else max(each)) for each in values)
        low = 0.0 if self.stacked else min(0.0, *(min(each) for each in values))
        up = Axis(low, 1.02 * high or 1.0, HEIGHT - BOTTOM, TOP)
        yield from self._vertical(up, self.axis)
        slot = (WIDTH - LEFT - RIGHT) / len(self.groups)
        for i, (group, bars) in enumerate(self.groups.items()):
            start, width = LEFT + i * slot + 0.1 * slot, 0.8 * slot / (1 if self.stacked else len(bars))
            base = 0.0
            for j, (name, value) in enumerate(bars.items()):
                x = start if self.stacked else start + j * width
                if value is None:
                    yield text(x + width / 2, up.at(0) - 4, "x", size=14)
                    continue
                top, bottom = (base + value, base) if self.stacked else (max(value, 0.0), min(value, 0.0))
                yield box(x, up.at(top), width, up.at(bottom) - up.at(top), self.colour(name))
                base += value
            yield text(start + 0.4 * slot, HEIGHT - BOTTOM + 16, group, size=10, anchor="end", turned=-20)


@dataclass(kw_only=True)
class Timeline(Picture):
    """Boxes of calls over time, on consecutive devices."""

    x: str
    y: str
    boxes: list[tuple[str, float, float, int, int]] = field(default_factory=list)

    def add(self, name: str, start_s: float, end_s: float, first: int, num_devices: int) -> None:
        self.colour(name)
        self.boxes.append((name, start_s, end_s, first, num_devices))

    def drawn(self) -> Iterator[str]:
        across = Axis(0, max(end for _, _, end, _, _ in self.boxes), LEFT, WIDTH - RIGHT)
        down = Axis(0, max(first + size for *_, first, size in self.boxes), TOP, HEIGHT - BOTTOM)
        yield from self._vertical(down, self.y)
        yield from self._horizontal(across, self.x)
        for name, start, end, first, size in self.boxes:
            x, y = across.at(start), down.at(first)
            yield box(x, y, across.at(end) - x, down.at(first + size) - y, self.colour(name))
