"""The few SVG elements that a report's figures are made of. Text is escaped; looks come from `report.css`."""

from collections.abc import Iterable
from html import escape


def drawing(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """An inline `<svg>`; `label` is what a screen reader says."""
    inside = "\n".join(parts)
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">\n{inside}\n</svg>'


def text(x: float, y: float, words: str, css: str = "") -> str:
    named = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(words)}</text>'


def upright(x: float, y: float, words: str) -> str:
    """Turned by a quarter, for a vertical axis."""
    return (
        f'<text class="soft middle" transform="translate({x:.1f} {y:.1f}) rotate(-90)">{escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def bar(x1: float, x2: float, y: float, height: float, css: str, title: str) -> str:
    """From x1 to x2, in either order."""
    left, width = min(x1, x2), abs(x2 - x1)
    return (
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{css}">'
        f"<title>{escape(title)}</title></rect>"
    )


def dot(x: float, y: float, css: str, title: str, *, square: bool = False) -> str:
    """A square tells its series where colours do not."""
    if square:
        shape, close = f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"', "</rect>"
    else:
        shape, close = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"', "</circle>"
    return f'{shape} class="{css}"><title>{escape(title)}</title>{close}'


def ring(x: float, y: float, css: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="10" class="{css}"/>'


def polyline(points: Iterable[tuple[float, float]], css: str) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" class="{css}"/>'
