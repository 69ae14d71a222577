"""A small SVG canvas: boxes, arrows and texts that follow the reader's light or dark colour scheme.

Teal and orange are those of the pages (server/pages/static/shared/theme.css): graphs and replays are teal, work on the
host and eager steps orange. Blue is for a further kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328 }
  .small { font-size: 12px; fill: #57606a }
  .title { font-weight: 600 }
  .group { fill: none; stroke: #8c959f; stroke-dasharray: 5 4 }
  .plain { fill: #f6f8fa; stroke: #8c959f }
  .teal { fill: #dcefed; stroke: #0b7a6f }
  .orange { fill: #fff1d6; stroke: #d98a1c }
  .blue { fill: #ddf4ff; stroke: #0072b2 }
  .empty { fill: none; stroke: #8c959f }
  .line { fill: none; stroke: #57606a; stroke-width: 1.5 }
  .head { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9da7b1 }
    .plain { fill: #21262d; stroke: #6e7681 }
    .teal { fill: #0f332f; stroke: #4cc9b6 }
    .orange { fill: #3d2b05; stroke: #d9963a }
    .blue { fill: #0b2f47; stroke: #56b4e9 }
    .group, .empty { stroke: #6e7681 }
    .line { stroke: #9da7b1 }
    .head { fill: #9da7b1 }
  }
"""
LINE = 18  # pixels between lines of text


@dataclass
class Canvas:
    """A picture of `width` by `height` pixels. Coordinates are pixels from the upper left corner."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, text: str = "", kind: str = "plain", small: str = "") -> None:
        """Draw a box with centred lines of text, and smaller ones below them."""
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="5"/>')
        lines = [(line, "") for line in text.split("\n") if line] + [
            (line, "small") for line in small.split("\n") if line
        ]
        top = y + h / 2 - (len(lines) - 1) * LINE / 2 + 5
        for index, (line, look) in enumerate(lines):
            self.text(x + w / 2, top + index * LINE, line, look, "middle")

    def group(self, x: float, y: float, w: float, h: float, text: str) -> None:
        """Draw a dashed frame with a title inside its upper edge."""
        self.parts.append(f'<rect class="group" x="{x}" y="{y}" width="{w}" height="{h}" rx="8"/>')
        self.text(x + 12, y + 20, text, "small title")

    def text(self, x: float, y: float, text: str, look: str = "", anchor: str = "start") -> None:
        """Write one line; `y` is its baseline."""
        self.parts.append(f'<text class="{look}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], text: str = "", both: bool = False) -> None:
        """Draw a line through the points with a head at its end; the text is beside its first part."""
        path = "M" + " L".join(f"{x},{y}" for x, y in points)
        heads = 'marker-end="url(#head)"' + (' marker-start="url(#head)"' if both else "")
        self.parts.append(f'<path class="line" d="{path}" {heads}/>')
        if text:
            (x, y), (next_x, next_y) = points[:2]
            if x == next_x:
                self.text(x + 8, (y + next_y) / 2 + 4, text, "small")
            else:
                self.text((x + next_x) / 2, y - 6, text, "small", "middle")

    def svg(self) -> str:
        """Return the picture as an SVG document."""
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>',
            *self.parts,
            "</svg>\n",
        ])  # fmt: skip
