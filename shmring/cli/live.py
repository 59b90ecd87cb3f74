"""`shmring top`: rates from two looks at the same rings, a frame at a time."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from shmring.cli.diagnosis import Condition, Diagnosis, diagnose
from shmring.cli.selection import is_under
from shmring.cli.table import Cell, Column, render
from shmring.cli.terminal import Terminal, Tone
from shmring.cli.units import NOTHING, escaped, format_bar, format_bytes, format_count, format_ratio
from shmring.ring import list_rings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmring.ring import SegmentInfo
    from shmring.statistics import EndStatistics, RingStatistics

_BAR_WIDTH = 8
_COLUMNS = (
    Column("NAME"),
    Column("FILL"),
    Column("REC/S", is_number=True),
    Column("BYTES/S", is_number=True),
    Column("PWAIT", is_number=True),
    Column("CWAIT", is_number=True),
    Column("NOW", clipped_to=21),
)
#: Narrower than this, the last column has the brief form of what goes on.
_WIDTH_FOR_SENTENCES = 120


@dataclass(frozen=True)
class Look:
    """The rings at one moment of the monotonic clock."""

    at_s: float
    infos: tuple[SegmentInfo, ...]


@dataclass(frozen=True)
class Rates:
    """What happened to one ring between two looks, by the second."""

    records_per_s: float
    bytes_per_s: float
    producer_wait: float
    """Share of the time that the producer slept for room, 0 to 1."""
    consumer_wait: float
    """Share of the time that the consumer slept for records, 0 to 1."""


def take_look(prefix: str | None) -> Look:
    """Read every ring under `prefix`."""
    infos = (info for info in list_rings() if prefix is None or is_under(info.name, prefix))
    return Look(time.monotonic(), tuple(info for info in infos if info.kind not in ("blob", "unfinished")))


def rates_between(before: RingStatistics, after: RingStatistics, seconds: float) -> Rates | None:
    """None where the two are not the same ring: it was made anew in between."""
    old, new = before.producer, after.producer
    is_same = before.owner_pid == after.owner_pid and before.capacity_bytes == after.capacity_bytes
    if not is_same or seconds <= 0 or new.position < old.position or new.records < old.records:
        return None
    return Rates(
        records_per_s=max(0, after.consumer.records - before.consumer.records) / seconds,
        bytes_per_s=max(0, after.consumer.bytes - before.consumer.bytes) / seconds,
        producer_wait=_wait_share(old, new, seconds),
        consumer_wait=_wait_share(before.consumer, after.consumer, seconds),
    )


def _wait_share(before: EndStatistics, after: EndStatistics, seconds: float) -> float:
    """With the wait that is going on: it is counted as parked only when it ends."""
    slept_ns = after.parked_ns + (after.waiting_ns or 0) - before.parked_ns - (before.waiting_ns or 0)
    return min(1.0, max(0.0, slept_ns / 1e9 / seconds))


def frame_lines(before: Look, after: Look, terminal: Terminal) -> list[str]:
    """One frame: a line for each ring that is there now, as many as the terminal has room for."""
    old = {info.name: info.statistics for info in before.infos}
    seconds = after.at_s - before.at_s
    is_wide = terminal.width is None or terminal.width >= _WIDTH_FOR_SENTENCES
    rows = [_row(info, old.get(info.name), seconds, is_wide=is_wide) for info in after.infos]
    if not rows:
        return ["no rings"]
    hidden = 0
    if terminal.height is not None:
        room = max(1, terminal.height - 4)  # head, titles, what columns are left out, what rings are
        hidden = max(0, len(rows) - room)
    lines = render(_COLUMNS, rows[: len(rows) - hidden], terminal)
    return [*lines, terminal.paint(f"({hidden} more)", Tone.QUIET)] if hidden else lines


def _row(info: SegmentInfo, before: RingStatistics | None, seconds: float, *, is_wide: bool) -> list[Cell]:
    name, ring = Cell(escaped(info.name)), info.statistics
    if ring is None:
        text = f"{info.kind}: {escaped(info.problem or '')}" if is_wide else info.kind
        return [name, *[Cell(NOTHING)] * (len(_COLUMNS) - 2), Cell(text, Tone.ALARM)]
    diagnosis = diagnose(ring)
    fill_tone = Tone.WARNING if diagnosis.condition in (Condition.FULL, Condition.STUCK) else Tone.PLAIN
    fill = Cell(f"{format_bar(ring.fill, _BAR_WIDTH)} {format_ratio(ring.fill):>4}", fill_tone)
    return [name, fill, *_rate_cells(before, ring, seconds), _now_cell(diagnosis, ring, is_wide=is_wide)]


def _rate_cells(before: RingStatistics | None, ring: RingStatistics, seconds: float) -> list[Cell]:
    rates = None if before is None else rates_between(before, ring, seconds)
    if rates is None:
        return [Cell(NOTHING)] * 4
    return [
        Cell(format_count(rates.records_per_s)),
        Cell(format_bytes(rates.bytes_per_s)),
        Cell(format_ratio(rates.producer_wait), Tone.WARNING if rates.producer_wait >= 0.5 else Tone.PLAIN),
        Cell(format_ratio(rates.consumer_wait)),
    ]


def _now_cell(diagnosis: Diagnosis, ring: RingStatistics, *, is_wide: bool) -> Cell:
    if ring.owner_state != "attached":
        leftover = "leftover" if not is_wide else f"leftover of pid {ring.owner_pid}; {diagnosis.sentence}"
        return Cell(leftover, Tone.ALARM)
    return Cell(diagnosis.sentence if is_wide else diagnosis.brief, diagnosis.tone)


def run_top(prefix: str | None, interval_s: float, *, once: bool, stream: IO[str]) -> None:
    """Show frame after frame until `q` or Ctrl-C; one frame with `once`."""
    before = take_look(prefix)
    if once or not stream.isatty():
        while True:
            time.sleep(interval_s)
            after = take_look(prefix)
            print("\n".join(frame_lines(before, after, Terminal.of(stream))), file=stream, flush=True)
            if once:
                return
            print(file=stream)
            before = after
    with _full_screen(stream) as quit_asked:
        # a first frame soon, the others at leisure
        pause_s = min(interval_s, 0.25)
        while not quit_asked(pause_s):
            after = take_look(prefix)
            terminal = Terminal.of(stream)
            head = f"shmring top: {prefix or 'all rings'}, every {interval_s:g} s, q to quit"
            lines = [
                terminal.paint(head[: terminal.width], Tone.QUIET),
                *frame_lines(before, after, terminal),
            ]
            # home, each line cleared to its end, then everything below: no flicker
            stream.write(
                "\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in lines[:-1]) + f"{lines[-1]}\x1b[K\x1b[J"
            )
            stream.flush()
            before, pause_s = after, interval_s


@contextlib.contextmanager
def _full_screen(stream: IO[str]) -> Iterator[Callable[[float], bool]]:
    """Take a second screen, and give the first one back. Yields: wait so many seconds, or for `q`."""
    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    settings = termios.tcgetattr(keys) if keys is not None else None
    stream.write("\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J")
    stream.flush()
    try:
        if keys is not None:
            tty.setcbreak(keys)
        yield lambda seconds: _quit_asked(keys, seconds)
    finally:
        if keys is not None and settings is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, settings)
        stream.write("\x1b[?25h\x1b[?1049l")
        stream.flush()


def _quit_asked(keys: int | None, seconds: float) -> bool:
    if keys is None:
        time.sleep(seconds)
        return False
    ends_s = time.monotonic() + seconds
    while (left_s := ends_s - time.monotonic()) > 0:
        if not select.select([keys], [], [], left_s)[0]:
            continue
        typed = os.read(keys, 64)
        if not typed or b"q" in typed:
            return True
    return False
