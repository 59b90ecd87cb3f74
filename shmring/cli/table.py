"""A table that fits its terminal: columns that matter less go first, names lose their middle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmring.cli.terminal import Terminal, Tone

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Characters that a name is shortened to before a column is left out.
NAME_WIDTH_MIN = 14


@dataclass(frozen=True)
class Column:
    """One column. The first of a table holds names."""

    title: str
    is_number: bool = False
    rank: int = 0
    """0: always there. Where the terminal is too narrow the highest rank goes first."""
    clipped_to: int | None = None
    """Text that says enough with so many characters, and is clipped before anything else gives way."""


@dataclass(frozen=True)
class Cell:
    """One piece of text and what it means."""

    text: str
    tone: Tone = Tone.PLAIN


def shortened(text: str, width: int) -> str:
    """At most `width` characters of `text`: beginning and end stay, for the end tells rings apart."""
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return text[:head] + "~" + text[len(text) - (width - 1 - head) :]


def render(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], terminal: Terminal) -> list[str]:
    """Lines of the table, title line first. Left-out columns are named in a last line."""
    titles = [Cell(column.title, Tone.TITLE) for column in columns]
    table = [titles, *rows]
    widths = [max(len(row[i].text) for row in table) for i in range(len(columns))]
    shown = list(range(len(columns)))
    gap = 2
    if terminal.width is not None:
        gap, shown = _fit(columns, widths, terminal.width)
    lines = [
        _line(row, [(i, widths[i], columns[i].is_number) for i in shown], gap, terminal) for row in table
    ]
    left_out = [column.title.lower() for i, column in enumerate(columns) if i not in shown]
    if left_out:
        lines.append(terminal.paint(f"(too narrow for: {', '.join(left_out)})", Tone.QUIET))
    return lines


def _fit(columns: Sequence[Column], widths: list[int], room: int) -> tuple[int, list[int]]:
    """Choose gap and columns, and shorten `widths`, so that the table fits; the last resort is clipping."""
    shown = list(range(len(columns)))

    def excess(gap: int) -> int:
        return sum(widths[i] for i in shown) + gap * (len(shown) - 1) - room

    if excess(2) <= 0:
        return 2, shown
    for i, column in enumerate(columns):
        if column.clipped_to is not None:
            widths[i] = max(min(widths[i], column.clipped_to), widths[i] - max(0, excess(1)))
    name_width = widths[0]
    while True:
        widths[0] = max(min(name_width, NAME_WIDTH_MIN), name_width - max(0, excess(1)))
        droppable = [i for i in shown if columns[i].rank > 0]
        if excess(1) <= 0 or not droppable:
            break
        shown.remove(max(droppable, key=lambda i: columns[i].rank))
        widths[0] = name_width
    last = shown[-1]
    widths[last] = max(1, widths[last] - max(0, excess(1)))
    return 1, shown


def _line(row: Sequence[Cell], shown: list[tuple[int, int, bool]], gap: int, terminal: Terminal) -> str:
    parts = []
    for i, width, is_number in shown:
        text = shortened(row[i].text, width) if i == 0 else row[i].text[:width]
        padding = " " * (width - len(text))
        painted = terminal.paint(text, row[i].tone)
        parts.append(padding + painted if is_number else painted + padding)
    return (" " * gap).join(parts).rstrip()
