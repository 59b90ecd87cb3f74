"""`shmring stat`: everything of one ring."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from shmring.cli.diagnosis import diagnose
from shmring.cli.terminal import Terminal, Tone
from shmring.cli.units import NOTHING, escaped, format_bar, format_bytes, format_duration, format_ratio

if TYPE_CHECKING:
    from shmring.statistics import EndStatistics, RingStatistics

_BAR_WIDTH = 30
_LABEL_WIDTH = 14
_END_WIDTH = 22
#: Rows without a count keep the scale of a histogram even; more of them would push its ends off the screen.
_EMPTY_ROWS_MAX = 4


def inspection_lines(ring: RingStatistics, terminal: Terminal) -> list[str]:
    """Blocks: what it is, what goes on, the memory, the two ends, the waits."""
    blocks = [_head(ring, terminal), _memory(ring), _ends(ring, terminal), waits_lines(ring, terminal)]
    return list(itertools.chain.from_iterable([*block, ""] for block in blocks))[:-1]


def _head(ring: RingStatistics, terminal: Terminal) -> list[str]:
    diagnosis = diagnose(ring)
    name = terminal.paint(escaped(ring.name), Tone.TITLE)
    lines = [name, *terminal.wrapped(diagnosis.sentence, diagnosis.tone)]
    if ring.owner_state != "attached":
        text = f"leftover: its owner (pid {ring.owner_pid}) is gone; `shmring sweep` removes it"
        lines += terminal.wrapped(text, Tone.ALARM)
    if ring.is_retired:
        lines += terminal.wrapped("retired: its name was taken away; only those attached still see it")
    return lines


def _memory(ring: RingStatistics) -> list[str]:
    def with_bar(count: int) -> str:
        ratio = count / ring.capacity_bytes
        return f"{format_bytes(count):>10}  {format_bar(ratio, _BAR_WIDTH)} {format_ratio(ratio):>4}"

    owner = "alive" if ring.owner_state == "attached" else "gone"
    return [
        f"{'capacity':<{_LABEL_WIDTH}}{format_bytes(ring.capacity_bytes):>10}",
        f"{'used':<{_LABEL_WIDTH}}{with_bar(ring.used_bytes)}",
        f"{'high water':<{_LABEL_WIDTH}}{with_bar(ring.high_water_bytes)}",
        f"{'owner':<{_LABEL_WIDTH}}{ring.owner_pid:>10}  {owner}",
    ]


def _ends(ring: RingStatistics, terminal: Terminal) -> list[str]:
    producer, consumer = _end_column(ring.producer), _end_column(ring.consumer)
    title = f"{'':<{_LABEL_WIDTH}}{'PRODUCER':>{_END_WIDTH}}{'CONSUMER':>{_END_WIDTH}}"
    lines = [terminal.paint(title, Tone.TITLE)]
    for (label, left), (_, right) in zip(producer, consumer, strict=True):
        lines.append(f"{label:<{_LABEL_WIDTH}}{left:>{_END_WIDTH}}{right:>{_END_WIDTH}}")
    return lines


def _end_column(end: EndStatistics) -> list[tuple[str, str]]:
    def duration(ns: int | None) -> str:
        return NOTHING if ns is None else format_duration(ns)

    return [
        ("state", end.state),
        ("pid", str(end.pid) if end.attaches else NOTHING),
        ("attaches", f"{end.attaches:,}"),
        ("position", f"{end.position:,}"),
        ("records", f"{end.records:,}"),
        ("bytes", format_bytes(end.bytes)),
        ("batches", f"{end.batches:,}"),
        ("stalls", f"{end.stalls:,}"),
        ("parks", f"{end.parks:,}"),
        ("parked", duration(end.parked_ns)),
        ("wakes sent", f"{end.wakes_sent:,}"),
        ("idle for", duration(end.idle_ns)),
        ("waiting for", duration(end.waiting_ns)),
    ]


def waits_lines(ring: RingStatistics, terminal: Terminal) -> list[str]:
    """The histogram of how long records lay in the ring, and its quantiles."""
    counts = ring.waits_log2_ns
    total = sum(counts)
    title = "HOW LONG RECORDS WAITED"
    if total == 0:
        return [terminal.paint(title, Tone.TITLE), "nothing timed yet (one publication in 64 is)"]
    folded, first = _without_thin_start(counts)
    last = max(bin_ for bin_, count in enumerate(folded) if count)
    lines = [terminal.paint(f"{title} ({total:,} timed, one publication in 64)", Tone.TITLE)]
    most = max(folded)
    shown = list(range(first, last + 1))
    if folded[first : last + 1].count(0) > _EMPTY_ROWS_MAX:
        shown = [bin_ for bin_ in shown if folded[bin_]]
    for bin_ in shown:
        bar = "#" * -(-folded[bin_] * _BAR_WIDTH // most)
        label = f"below {format_duration(2**bin_)}"
        lines.append(f"{label:<{_LABEL_WIDTH}}{folded[bin_]:>10,}  {bar}".rstrip())
    marks = ", ".join(
        f"{name} below {format_duration(quantile_ns(counts, share))}"
        for name, share in (("half", 0.5), ("99 %", 0.99))
    )
    return [*lines, f"{marks}, all below {format_duration(2**last)}"]


def _without_thin_start(counts: tuple[int, ...]) -> tuple[list[int], int]:
    """Add the fastest bins that together are under half a percent to the next: a screen has few lines.

    Returns the bins and the first of them to show. The slowest stay as they are: those are looked for.
    """
    sums = list(itertools.accumulate(counts))
    first = next(bin_ for bin_, below in enumerate(sums) if below * 200 >= sums[-1])
    return [0] * first + [sums[first], *counts[first + 1 :]], first


def quantile_ns(counts: tuple[int, ...], share: float) -> int:
    """Upper bound of the bin below which `share` of the timed records lie; 0 if there are none."""
    total = sum(counts)
    for bin_, below in enumerate(itertools.accumulate(counts)):
        if below and below >= share * total:
            return 1 << bin_
    return 0


def ring_json(ring: RingStatistics) -> dict[str, Any]:
    """Every counter for programs. The keys are documented in docs/reference/cli.md and stable."""
    diagnosis = diagnose(ring)
    return {
        "name": ring.name,
        "condition": diagnosis.condition.value,
        "sentence": diagnosis.sentence,
        "capacity_bytes": ring.capacity_bytes,
        "used_bytes": ring.used_bytes,
        "fill_ratio": ring.fill,
        "high_water_bytes": ring.high_water_bytes,
        "owner_state": ring.owner_state,
        "owner_pid": ring.owner_pid,
        "retired": ring.is_retired,
        "producer": _end_json(ring.producer),
        "consumer": _end_json(ring.consumer),
        "waits": [
            {"below_ns": 1 << bin_, "count": count} for bin_, count in enumerate(ring.waits_log2_ns) if count
        ],
    }


def _end_json(end: EndStatistics) -> dict[str, Any]:
    return {
        "state": end.state,
        "pid": end.pid,
        "attaches": end.attaches,
        "position_bytes": end.position,
        "records": end.records,
        "bytes": end.bytes,
        "batches": end.batches,
        "stalls": end.stalls,
        "parks": end.parks,
        "parked_ns": end.parked_ns,
        "wakes_sent": end.wakes_sent,
        "idle_ns": end.idle_ns,
        "waiting_ns": end.waiting_ns,
    }
