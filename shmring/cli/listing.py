"""`shmring ls`: everything of ours in shared memory, a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmring.cli.diagnosis import Condition, diagnose
from shmring.cli.inspection import ring_json
from shmring.cli.table import Cell, Column, render
from shmring.cli.terminal import Terminal, Tone
from shmring.cli.units import NOTHING, escaped, format_bytes, format_count, format_ratio
from shmring.layout import HEADER_LENGTH

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shmring.ring import SegmentInfo
    from shmring.statistics import EndStatistics

_COLUMNS = (
    Column("NAME"),
    Column("KIND"),
    Column("SIZE", is_number=True),
    Column("FILL", is_number=True),
    Column("PRODUCER"),
    Column("CONSUMER"),
    Column("OWNER"),
    Column("RECORDS", is_number=True, rank=2),
    Column("BYTES", is_number=True, rank=3),
    Column("STALLS", is_number=True, rank=1),
)
_END_STATES = {"attached": Tone.PLAIN, "lost": Tone.ALARM, "finished": Tone.QUIET, "unknown": Tone.ALARM}


def listing_lines(
    infos: Sequence[SegmentInfo], leftovers: Collection[str], hidden_count: int, terminal: Terminal
) -> list[str]:
    """Build the table, and under it what needs a word. `leftovers` are names that a sweep would remove."""
    lines = []
    if infos:
        lines = render(_COLUMNS, [_row(info, info.name in leftovers) for info in infos], terminal)
    elif not hidden_count:
        return ["no rings"]
    notes = [line for info in infos for line in _notes(info, info.name in leftovers, terminal)]
    if hidden_count:
        notes.append(f"{hidden_count} unfinished not shown: --all shows them")
    return [*lines, "", *notes] if lines and notes else lines or notes


def room_bytes(info: SegmentInfo) -> int:
    """Size as the tables show it: without the header, where there is one."""
    if info.statistics is not None:
        return info.statistics.capacity_bytes
    return info.size_bytes - (HEADER_LENGTH if info.kind == "blob" else 0)


def _row(info: SegmentInfo, is_leftover: bool) -> list[Cell]:
    ring = info.statistics
    owner_known = {True: Cell("alive"), False: Cell("gone", Tone.ALARM), None: Cell(NOTHING)}
    owner = Cell("gone", Tone.ALARM) if is_leftover else owner_known[info.owner_alive]
    kind = Cell(info.kind, Tone.PLAIN if info.kind in ("ring", "blob") else Tone.ALARM)
    name = Cell(escaped(info.name), Tone.ALARM if is_leftover else Tone.PLAIN)
    size = Cell(format_bytes(room_bytes(info)))
    if ring is None:
        return [name, kind, size, *[Cell(NOTHING)] * 3, owner, *[Cell(NOTHING)] * 3]
    diagnosis = diagnose(ring)
    return [
        name,
        kind,
        size,
        Cell(
            format_ratio(ring.fill),
            diagnosis.tone if diagnosis.condition is not Condition.FLOWING else Tone.PLAIN,
        ),
        _end_cell(ring.producer),
        _end_cell(ring.consumer),
        owner,
        Cell(format_count(ring.producer.records)),
        Cell(format_bytes(ring.producer.bytes)),
        Cell(format_count(ring.producer.stalls)),
    ]


def _end_cell(end: EndStatistics) -> Cell:
    if end.state == "never":
        return Cell("never", Tone.QUIET)
    word = {"attached": "", "finished": " done"}.get(end.state, f" {end.state}")
    return Cell(f"{end.pid}{word}", _END_STATES.get(end.state, Tone.PLAIN))


def _notes(info: SegmentInfo, is_leftover: bool, terminal: Terminal) -> list[str]:
    """What a reader must not miss, in words."""
    name = escaped(info.name)
    notes = []
    if info.problem is not None:
        notes.append((f"{name}: {info.kind}: {escaped(info.problem)}", Tone.ALARM))
    if is_leftover:
        pid = f" (pid {info.statistics.owner_pid})" if info.statistics else ""
        notes.append((f"{name}: leftover: its owner{pid} is gone; `shmring sweep` removes it", Tone.ALARM))
    if info.statistics is not None:
        diagnosis = diagnose(info.statistics)
        if diagnosis.tone in (Tone.ALARM, Tone.WARNING):
            notes.append((f"{name}: {diagnosis.sentence}", diagnosis.tone))
    return [line for text, tone in notes for line in terminal.wrapped(text, tone)]


def listing_json(infos: Sequence[SegmentInfo], leftovers: Collection[str]) -> dict[str, Any]:
    """The same for programs, with every counter."""
    return {"segments": [segment_json(info, is_leftover=info.name in leftovers) for info in infos]}


def segment_json(info: SegmentInfo, *, is_leftover: bool) -> dict[str, Any]:
    """One segment."""
    return {
        "name": info.name,
        "kind": info.kind,
        "size_bytes": info.size_bytes,
        "mode": f"{info.mode:04o}",
        "uid": info.uid,
        "owner_alive": info.owner_alive,
        "leftover": is_leftover,
        "problem": info.problem,
        "ring": None if info.statistics is None else ring_json(info.statistics),
    }
