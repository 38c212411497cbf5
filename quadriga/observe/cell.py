# SPDX-License-Identifier: Apache-2.0
"""The curve of a run as an SVG picture, and the cell of a notebook that shows it beside the progress bar."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

COLORS = ("#3b6fd4", "#d9480f", "#2b8a6e", "#6d5bd0", "#a61e4d", "#e67700")
WIDTH, HEIGHT, LEFT, BELOW, ABOVE = 640, 220, 56, 22, 24
INK = 'fill="#7a8191" font-family="sans-serif" font-size="11"'

Points = Sequence[tuple[float, float]]


class Picture:
    """A picture that a notebook shows: curves of `(step, value)` by their names, over one axis of values."""

    def __init__(self, curves: Mapping[str, Points]) -> None:
        self.curves = {name: points for name, points in curves.items() if points}

    def _repr_svg_(self) -> str:
        places = [place for points in self.curves.values() for place in points] or [(0.0, 0.0)]
        (first, last), (low, high) = ((min(values), max(values)) for values in zip(*places, strict=True))
        x_scale = (WIDTH - LEFT - 12) / ((last - first) or 1)
        y_scale = (HEIGHT - ABOVE - BELOW) / ((high - low) or 1)
        top, bottom = ABOVE, HEIGHT - BELOW
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">']
        for y, value in ((top, high), (bottom, low)):
            parts.append(f'<path d="M{LEFT} {y}H{WIDTH - 12}" stroke="#e4e7ec"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end" {INK}>{value:.3g}</text>')
        for x, step, anchor in ((LEFT, first, "start"), (WIDTH - 12, last, "end")):
            parts.append(f'<text x="{x}" y="{HEIGHT - 6}" text-anchor="{anchor}" {INK}>step {step:g}</text>')
        for number, (name, points) in enumerate(self.curves.items()):
            color = COLORS[number % len(COLORS)]
            line = " ".join(f"{LEFT + (x - first) * x_scale:.1f},{bottom - (y - low) * y_scale:.1f}" for x, y in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.8"/>')
            dot = line.rpartition(" ")[2].split(",")
            parts.append(f'<circle cx="{dot[0]}" cy="{dot[1]}" r="2.6" fill="{color}"/>')
            place = f'x="{LEFT + 180 * number}" y="14" font-family="sans-serif" font-size="12"'
            parts.append(f'<text {place} fill="{color}">{escape(name)}</text>')
        return "".join([*parts, "</svg>"])

    def save(self, path: str | Path) -> Path:
        """Write the picture, an SVG file."""
        Path(path).write_text(self._repr_svg_(), encoding="utf-8")
        return Path(path)


class Cell:
    """The output of a notebook's cell: a bar, the numbers of the last step, and the curve of the first of them."""

    def __init__(self, total: int, initial: int) -> None:
        self._total, self._curves = total, dict[str, list[tuple[float, float]]]()
        display = import_module("IPython.display")
        self._html, self._handle = display.HTML, display.display(display.HTML(""), display_id=True)
        self.update(initial, {})

    def update(self, step: int, fields: Mapping[str, str]) -> None:
        """Show that `step` steps are done, and the numbers of the last one, as `Progress.update` takes them."""
        for label, value in list(fields.items())[:1]:
            self._curves.setdefault(label, []).append((step, float(value.replace(" ", ""))))
        text = escape("  ".join(f"{label} {value}" for label, value in fields.items()))
        bar = f'<progress value="{step}" max="{self._total}"></progress> step {step}/{self._total} <code>{text}</code>'
        curve: Any = Picture(self._curves)._repr_svg_() if self._curves else ""
        self._handle.update(self._html(f"<div>{bar}</div>{curve}"))
