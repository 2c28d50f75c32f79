"""Pictures as inline SVG.

Horizontal positions are percentages and there is no viewBox: so a picture takes the width it is
given while its text stays as large as the text around it.  Colours come from the style sheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

BAR_ROW = 42  # pixels: one line of text and one bar
CHART_HEIGHT = 140  # pixels
CHART_TOP, CHART_BOTTOM = 28, 34  # room for labels above and below the plot, in pixels
CHART_LEFT, CHART_RIGHT = 4.0, 96.0  # percent


@dataclass(frozen=True)
class Bar:
    """One bar: what it is and how long."""

    label: str
    bytes: int


@dataclass(frozen=True)
class Point:
    """One build in a chart over time."""

    date: str  # YYYY-MM-DD
    bytes: int
    name: str


def size(count: int) -> str:
    """Bytes for people, in decimal units as registries show them."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}" if unit == 10**9 else f"{count / unit:.0f} {name}"
    return f"{count} B"


def change(count: int) -> str:
    """A difference in bytes with its sign."""
    if count == 0:
        return "no change"
    return ("+" if count > 0 else "\N{MINUS SIGN}") + size(abs(count))


def bars(items: Sequence[Bar], title: str, name: str) -> Markup:
    """A bar per item, as long as its share of the sum.

    The numbers are in a table beside the picture, so for a screen reader the title is enough.
    """
    total = sum(item.bytes for item in items) or 1
    lines = []
    for index, item in enumerate(items):
        top = index * BAR_ROW
        share = 100 * item.bytes / total
        lines.append(
            Markup(
                '<text class="label" x="0" y="{}">{}</text>'
                '<text class="value" x="100%" y="{}" text-anchor="end">{} · {}</text>'
                '<rect class="track" x="0" y="{}" width="100%" height="12" rx="3"/>'
                '<rect class="bar" x="0" y="{}" width="{:.3f}%" height="12" rx="3" data-bytes="{}"/>'
            ).format(
                top + 14,
                _short(item.label),
                top + 14,
                size(item.bytes),
                percent(share),
                top + 21,
                top + 21,
                share,
                item.bytes,
            )
        )
    return _svg(title, name, len(items) * BAR_ROW, lines)


def chart(points: Sequence[Point], title: str, name: str) -> Markup:
    """Size over time, oldest first, evenly spaced.  The axis starts at 0, so slopes are honest."""
    top = max(point.bytes for point in points) or 1
    plot = CHART_HEIGHT - CHART_TOP - CHART_BOTTOM
    step = (CHART_RIGHT - CHART_LEFT) / max(len(points) - 1, 1)
    spots = [
        (CHART_LEFT + index * step, CHART_TOP + plot * (1 - point.bytes / top))
        for index, point in enumerate(points)
    ]
    base = CHART_TOP + plot
    lines = [Markup('<line class="axis" x1="0" x2="100%" y1="{0}" y2="{0}"/>').format(base)]
    for (x1, y1), (x2, y2) in pairwise(spots):
        lines.append(
            Markup('<line class="line" x1="{:.2f}%" y1="{:.1f}" x2="{:.2f}%" y2="{:.1f}"/>').format(
                x1, y1, x2, y2
            )
        )
    labelled = _labelled(len(points))
    for index, (point, (x, y)) in enumerate(zip(points, spots, strict=True)):
        lines.append(
            Markup(
                '<circle class="dot" cx="{:.2f}%" cy="{:.1f}" r="4" data-bytes="{}">'
                "<title>{}: {}</title></circle>"
            ).format(x, y, point.bytes, point.name, size(point.bytes))
        )
        if index in labelled:
            anchor = "start" if index == 0 else "end" if index == len(points) - 1 else "middle"
            edge = 0.0 if index == 0 else 100.0 if index == len(points) - 1 else x
            lines.append(
                Markup(
                    '<text class="value" x="{0:.2f}%" y="{1:.1f}" text-anchor="{2}">{3}</text>'
                    '<text class="label" x="{0:.2f}%" y="{4}" text-anchor="{2}">{5}</text>'
                ).format(edge, y - 10, anchor, size(point.bytes), base + 22, point.date)
            )
    return _svg(title, name, CHART_HEIGHT, lines)


def percent(share: float) -> str:
    """A share for people: nothing that is there is called 0 %."""
    return "<1 %" if 0 < share < 1 else f"{share:.0f} %"


def _labelled(count: int) -> set[int]:
    """First, last, and the middle one where there is room for three labels on a phone."""
    return {0, count - 1} | ({count // 2} if count >= 5 and count % 2 else set())


def _short(label: str, most: int = 34) -> str:
    """As much as fits beside the value on a phone; the table has the whole text."""
    return label if len(label) <= most else label[: most - 1].rstrip() + "…"


def _svg(title: str, name: str, height: int, lines: Iterable[Markup]) -> Markup:
    return Markup(
        '<svg class="picture" role="img" aria-labelledby="{0}" width="100%" height="{1}">'
        '<title id="{0}">{2}</title>{3}</svg>'
    ).format(name, height, title, Markup("\n").join(lines))
