"""Bar charts of the results, as SVG.

    python benchmarks/plot.py results.json docs/explanation/figures

The best form of each way, on a logarithmic scale; the thin line is the spread over the rounds.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from html import escape
from pathlib import Path

WIDTH, LABEL, ROW, TOP = 800, 270, 24, 56
COLOURS = {"ours": "#1b6ca8", "C": "#7a7a7a", "other": "#d08a3c"}
FIGURES = [
    ("records-64", "records", "per_s", 64, "Records of 64 bytes a second, one call each", "more is better"),
    ("records-262144", "records", "per_s", 262144, "Records of 256 KiB a second", "more is better"),
    ("round-trip", "pingpong", "p50_us", 64, "Round trip of 64 bytes, us, median", "less is better"),
    ("step-cpu", "steps", "writer_cpu_us", 256, "A step of 256 rows: the writer's CPU, us", "less is better"),
    (
        "step-paced",
        "paced",
        "delivery_p50_us",
        256,
        "A step every 4 ms, asleep: delivery, us",
        "less is better",
    ),
    ("busy-thread", "busy", "p99.9_us", 256, "The call beside a busy thread, us, p99.9", "less is better"),
]


def rows_of(
    results: dict, kind: str, field: str, size: int, most: bool
) -> list[tuple[str, float, float, float]]:
    """Label, median, least and most, of the best form of each way that polls or waits; best first."""
    best: dict[str, tuple[str, float, float, float]] = {}
    for key, runs in results.items():
        parts = key.split("|")
        values = [run[field] for run in runs if field in run]
        if len(parts) < 5 or parts[0] != kind or int(parts[3]) != size or not values:
            continue
        label = " ".join(part for part in (parts[1], parts[2], parts[4]) if part and part != "-")
        row = (label, statistics.median(values), min(values), max(values))
        name = parts[1] if kind != "pingpong" else label
        if name not in best or (row[1] > best[name][1]) == most:
            best[name] = row
    return sorted(best.values(), key=lambda row: row[1], reverse=most)


def bar_chart(title: str, note: str, rows: list[tuple[str, float, float, float]]) -> str:
    low = 10 ** math.floor(math.log10(min(row[2] for row in rows)) - 0.3)
    high = 10 ** math.ceil(math.log10(max(row[3] for row in rows)))
    plot = WIDTH - LABEL - 90

    def x(value: float) -> float:
        return LABEL + plot * math.log(value / low) / math.log(high / low)

    height = TOP + ROW * len(rows) + 34
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-size="12">',
        f'<g font-family="sans-serif"><rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="12" y="40" fill="#555">{escape(note)}; logarithmic</text>',
    ]
    mark = low
    while mark <= high * 1.01:
        out.append(
            f'<line x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{TOP}" y2="{height - 28}" stroke="#ddd"/>'
            f'<text x="{x(mark):.1f}" y="{height - 12}" text-anchor="middle" fill="#555">{short(mark)}</text>'
        )
        mark *= 10
    for index, (label, middle, least, most) in enumerate(rows):
        y = TOP + ROW * index
        kind = "ours" if label.startswith("shmring") else "C" if label.startswith("C,") else "other"
        out.append(
            f'<text x="{LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>'
            f'<rect x="{LABEL}" y="{y + 4}" width="{x(middle) - LABEL:.1f}" height="{ROW - 8}" '
            f'fill="{COLOURS[kind]}"/>'
            f'<line x1="{x(least):.1f}" x2="{x(most):.1f}" y1="{y + 12}" y2="{y + 12}" stroke="black"/>'
            f'<text x="{max(x(middle), x(most)) + 6:.1f}" y="{y + 15}">{short(middle)}</text>'
        )
    return "\n".join([*out, "</g></svg>"]) + "\n"


def short(value: float) -> str:
    for limit, unit in ((1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def main() -> None:
    results = json.loads(Path(sys.argv[1]).read_text())["results"]
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind, field, size, title, note in FIGURES:
        rows = rows_of(results, kind, field, size, most=field == "per_s")
        if rows:
            (folder / f"{name}.svg").write_text(bar_chart(title, note, rows))


if __name__ == "__main__":
    main()
