"""Figures as people read them. ASCII only: a terminal at night may know nothing else."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_COUNT_UNITS = ("", "k", "M", "G", "T", "P", "E")
_TIME_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1, "ns"))
_SPANS = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))
#: What is not known, or does not apply.
NOTHING = "-"


def format_bytes(count: float) -> str:
    """900 B, 1.5 KiB, 64 MiB."""
    return _scaled(count, 1024, _BYTE_UNITS, " ")


def format_count(count: float) -> str:
    """Few characters: 950, 12k, 3.4M."""
    return _scaled(count, 1000, _COUNT_UNITS, "")


def _scaled(value: float, step: int, units: tuple[str, ...], gap: str) -> str:
    power = 0
    while round(value) >= step and power < len(units) - 1:
        value /= step
        power += 1
    digits = f"{value:.1f}" if value < 9.95 and round(value, 1) != round(value) else f"{value:.0f}"
    return f"{digits}{gap}{units[power]}".rstrip()


def format_ratio(ratio: float) -> str:
    """A share in percent; what is neither nothing nor all never looks like it."""
    if 0 < ratio < 0.01:
        return "<1%"
    if 0.99 < ratio < 1:
        return "99%"
    return f"{ratio:.0%}"


def format_duration(ns: float) -> str:
    """Three digits at most: 850 ns, 1.02 us, 3.2 s; then 5 min 3 s, 2 d 4 h."""
    if ns < 59.95e9:
        scale, unit = next(pair for pair in _TIME_UNITS if ns >= pair[0] or pair[0] == 1)
        value = ns / scale
        digits = 0 if scale == 1 or value >= 99.95 else 1 if value >= 9.995 else 2
        text = f"{value:.{digits}f}"
        return (text.rstrip("0").rstrip(".") if digits else text) + f" {unit}"
    seconds = round(ns / 1e9)
    large, large_unit, small, small_unit = next(span for span in _SPANS if seconds >= span[0])
    rest = seconds % large // small
    return f"{seconds // large} {large_unit}" + (f" {rest} {small_unit}" if rest else "")


def format_bar(ratio: float, width: int) -> str:
    """[###.....]: filled in proportion; a little is one mark, and only all of it is all of them."""
    filled = round(min(max(ratio, 0.0), 1.0) * width)
    if ratio > 0:
        filled = max(filled, 1)
    if ratio < 1:
        filled = min(filled, width - 1)
    return f"[{'#' * filled}{'.' * (width - filled)}]"


def escaped(text: str) -> str:
    """Text of foreign origin, harmless to a terminal.

    Anybody may put a file of any name into shared memory, and control characters in it would
    be obeyed by the terminal of whoever lists them.
    """
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode("ascii") for c in text)
