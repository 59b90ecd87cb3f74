"""Where the text goes: how wide it is, and whether it knows colours."""

from __future__ import annotations

import os
import shutil
import textwrap
from dataclasses import dataclass
from enum import Enum
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Tone(Enum):
    """What a piece of text means to its reader; the value is how a terminal shows it."""

    PLAIN = ""
    TITLE = "1"
    QUIET = "2"
    GOOD = "32"
    WARNING = "33"
    ALARM = "1;31"


@dataclass(frozen=True)
class Terminal:
    """What is known of an output. Not a terminal: no colours, and lines as long as they are."""

    width: int | None = None
    height: int | None = None
    has_colour: bool = False

    @classmethod
    def of(cls, stream: IO[str], environ: Mapping[str, str] | None = None) -> Terminal:
        """Look at `stream` as it is now; a window may be resized."""
        environ = os.environ if environ is None else environ
        if not stream.isatty():
            return cls()
        size = shutil.get_terminal_size()
        has_colour = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        return cls(width=size.columns, height=size.lines, has_colour=has_colour)

    def paint(self, text: str, tone: Tone) -> str:
        """Return `text` in that tone, or as it is."""
        if not self.has_colour or tone is Tone.PLAIN or not text:
            return text
        return f"\x1b[{tone.value}m{text}\x1b[0m"

    def wrapped(self, text: str, tone: Tone = Tone.PLAIN) -> list[str]:
        """Break `text` at words. Elsewhere than on a terminal a sentence stays one line to search in."""
        if self.width is None:
            return [text]
        lines = textwrap.wrap(text, max(20, self.width), subsequent_indent="    ", break_on_hyphens=False)
        return [self.paint(line, tone) for line in lines]
