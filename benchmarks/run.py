"""All benchmarks, interleaved: every round measures every cell once, in a new order.

    python benchmarks/run.py                     short: about two minutes, ours and the library's own ways
    python benchmarks/run.py --full --rounds 3   everything that is installed
    python benchmarks/run.py --report            only the tables again, from the last results

Results are kept in build/benchmarks.json (--out), every round of them; --append adds rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from engine import measure_engine, measure_paced
from measure import Task, measure
from peers import WAYS
from waits import idle_cpu_s, wake_up_us
from ways import Nothing, Ours, OursLatency, OursSmaller, OursThrifty, Way

from shmring import WaitPolicy

SIZES = (64, 1024, 16384, 262144, 1048576)
ROWS = (1, 32, 256, 2048, 16384)
SHORT = (
    "shmring",
    "shmring of 2 MiB",
    "nothing",
    "multiprocessing.Queue",
    "multiprocessing.Pipe",
    "os.pipe",
    "zmq",
)


def build_reference(folder: str) -> Path:
    program = Path(folder) / "reference"
    sources = [HERE / "c" / "reference.c", *sorted((ROOT / "native" / "src").glob("*.c"))]
    left_out = {"detok.c", "detok_step.c", "deal.c"}
    command = [
        os.environ.get("CC", "cc"),
        "-std=gnu11",
        "-O2",
        "-D_GNU_SOURCE",
        "-I",
        ROOT / "native" / "include",
    ]
    subprocess.run(
        [*command, *(s for s in sources if s.name not in left_out and "detok" not in s.name), "-o", program],
        check=True,
    )
    return program


def reference_cells(scale: float) -> dict[str, list[str]]:
    """Name of a cell, and the arguments that measure it."""

    def count(most: int) -> str:
        return str(max(64, int(most * scale)))

    cells = {
        "batches|C, same ring|poll|64|": ["ring", "64", count(6_000_000), "64"],
        "records|C, bare ring|poll|64|": ["bare", "64", count(6_000_000)],
        "pingpong|C, same ring|spin|64|": ["pingpong", "spin", count(200_000)],
        "pingpong|C, same ring|balanced|64|": ["pingpong", "10000", count(50_000)],
        "pingpong|C, same ring|thrifty|64|": ["pingpong", "park", count(10_000)],
        "paced|C, same ring|block|256|": ["wake", "4000", count(300)],
        "busy|C, same ring, no other thread|block|256|": ["wake", "500", count(3000)],
    }
    for rows in ROWS:
        most = max(2000, min(4_000_000, (4 << 30) // (25 * rows)))
        cells[f"steps|C, memcpy alone|-|{rows}|"] = ["columns", str(rows), count(most)]
    for size in SIZES:
        most = max(2000, min(4_000_000, (4 << 30) // size))
        cells[f"records|C, same ring|block|{size}|"] = ["ring", str(size), count(most), "1"]
        cells[f"records|C, memcpy alone|-|{size}|"] = ["memcpy", str(size), count(most)]
    return cells


def way_cells(full: bool, *, only_ours: bool) -> list[tuple[type[Way], str, Task]]:
    cells: list[tuple[type[Way], str, Task]] = []
    for way in WAYS:
        if not way.is_installed() or not (full or way.name in SHORT):
            continue
        if only_ours and not (issubclass(way, Ours) or way is Nothing):
            continue
        if way is Nothing:
            cells.append((way, "block", Task("busy", 256, "columns")))
            continue
        if way is OursSmaller:
            cells += [(way, mode, Task("records", size)) for mode in way.modes for size in SIZES[3:]]
            continue
        is_variant = way in (OursLatency, OursThrifty)
        for mode in way.modes:
            if not is_variant:
                cells += [(way, mode, Task("records", size)) for size in (SIZES if full else (64, 16384))]
            cells.append((way, mode, Task("pingpong", 64)))
        mode = way.modes[0]
        if way.has_batches:
            cells.append((way, mode, Task("batches", 64)))
        for codec in way.codecs:
            if not is_variant:
                cells += [(way, mode, Task("steps", rows, codec)) for rows in (ROWS if full else (256,))]
            cells.append((way, mode, Task("paced", 256, codec)))
            if way.name in ("shmring", "shmring latency", "zmq"):
                cells.append((way, mode, Task("busy", 256, codec)))
            if way.name == "shmring" and codec == "frame":
                cells.append((way, "spin", Task("busy", 256, codec)))
    return cells


def key_of(way: type[Way], mode: str, task: Task) -> str:
    return f"{task.kind}|{way.name}|{mode}|{task.size}|{task.codec}"


def measure_round(
    args: argparse.Namespace, reference: Path, results: dict[str, list[dict[str, float]]]
) -> None:
    jobs = {key_of(*cell): cell for cell in way_cells(args.full, only_ours=args.ours)}
    c_jobs = reference_cells(args.seconds)
    order = [
        *jobs,
        *c_jobs,
        *(f"{kind}|{rows}" for kind in ("engine", "parked") for rows in (256, 4096)),
        "idle",
        "wake",
    ]
    if args.only:
        order = [key for key in order if key.split("|")[0] in args.only.split(",")]
    random.shuffle(order)
    first = ["chrt", "--fifo", "10"] if args.first else []
    for number, key in enumerate(order):
        busy = _busy_s()
        start = time.monotonic()
        try:
            if key in jobs:
                way, mode, task = jobs[key]
                found = measure(way, mode, task, args.seconds)
            elif key in c_jobs:
                found = json.loads(
                    subprocess.run([*first, reference, *c_jobs[key]], capture_output=True, check=True).stdout
                )
            elif key == "idle":
                found = {p.name.lower(): idle_cpu_s(10 if args.full else 2, p) for p in WaitPolicy}
            elif key == "wake":
                turns = 300 if args.full else 100
                found = {
                    "blocking_us": wake_up_us(with_asyncio=False, count=turns),
                    "asyncio_us": wake_up_us(with_asyncio=True, count=turns),
                }
            elif key.startswith("parked"):
                found = measure_paced(int(key.split("|")[1]), is_first=args.first)
            else:
                found = measure_engine(int(key.split("|")[1]))
        except Exception as error:  # noqa: BLE001 -- one way that fails must not end the others
            print(f"{key}: failed: {error}", file=sys.stderr)
            continue
        found["machine_busy"] = (_busy_s() - busy) / (time.monotonic() - start)
        results[key].append(found)
        if args.verbose:
            print(f"{number + 1}/{len(order)} {key} {found}", flush=True)


def _busy_s() -> float:
    """Processor seconds that all processors have been busy since the machine started."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(numbers) - numbers[3] - numbers[4]) / os.sysconf("SC_CLK_TCK")


def table(results: dict[str, list[dict[str, float]]], kind: str, field: str, best: str) -> list[str]:
    """Rows of ways, columns of sizes: the median, and in brackets half the spread over the rounds."""
    sizes: set[int] = set()
    rows: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    for key, runs in results.items():
        parts = key.split("|")
        values = [run[field] for run in runs if field in run]
        if parts[0] != kind or not values:
            continue
        label = " ".join(part for part in (parts[1], parts[2], parts[4]) if part and part != "-")
        middle = statistics.median(values)
        rows[label][int(parts[3])] = (middle, (max(values) - min(values)) / 2 / middle)
        sizes.add(int(parts[3]))
    columns = sorted(sizes)
    ours = [row for label, row in rows.items() if label.startswith("shmring")]
    top = {
        s: (max if best == "most" else min)((r[s][0] for r in ours if s in r), default=0.0) for s in columns
    }
    lines = [
        "| way | " + " | ".join(f"{size:,}" for size in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]

    def rank(item: tuple[str, dict[int, tuple[float, float]]]) -> float:
        found = [value / (top[s] or 1) for s, (value, _) in item[1].items()]
        return (-1 if best == "most" else 1) * statistics.median(found)

    for label, row in sorted(rows.items(), key=rank):
        cells = []
        for size in columns:
            if size not in row:
                cells.append("")
                continue
            value, spread = row[size]
            ratio = f", {value / top[size]:.2g}x" if top[size] and not label.startswith("shmring") else ""
            cells.append(f"{_short(value)} (±{spread:.0%}{ratio})")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def _short(value: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.3g}"


TABLES = [
    ("records", "per_s", "most", "Records a second, one call each, by bytes"),
    ("batches", "per_s", "most", "Records of 64 bytes a second, in batches of 64"),
    ("pingpong", "p50_us", "least", "Round trip of 64 bytes, us, median"),
    ("pingpong", "p99_us", "least", "Round trip of 64 bytes, us, 99th percentile"),
    (
        "steps",
        "writer_cpu_us",
        "least",
        "Decode steps without a pause: the writer's processor time, us, by rows",
    ),
    ("steps", "per_s", "most", "Decode steps a second, through to columns, by rows"),
    (
        "paced",
        "writer_cpu_us",
        "least",
        "A step every 4 ms to a sleeping reader: the writer's processor time, us",
    ),
    ("paced", "wall_p50_us", "least", "The same: time in the call, us, median"),
    ("paced", "delivery_p50_us", "least", "The same: until the reader has the columns, us, median"),
    ("paced", "reader_cpu", "least", "The same: the reader's share of a processor"),
    (
        "busy",
        "p50_us",
        "least",
        "Beside a thread that runs Python all the time: time in the call, us, median",
    ),
    ("busy", "p99.9_us", "least", "The same, 99.9th percentile"),
    ("busy", "turns_per_s", "most", "The same: turns a second of the other thread"),
]


def report(results: dict[str, list[dict[str, float]]]) -> str:
    lines = []
    for kind, field, best, title in TABLES:
        rows = table(results, kind, field, best)
        if len(rows) > 2:
            lines += ["", f"### {title}", "", *rows]
    steps = [
        (f"{kind}|{rows}", title.format(rows=f"{rows:,}"))
        for kind, title in (
            ("engine", "A decode step of {rows} requests to four shards, back to back, us"),
            (
                "parked",
                "One of {rows} requests every 4 ms, to four readers asleep in their own processes, us",
            ),
        )
        for rows in (256, 4096)
    ]
    for key, title in (
        *steps,
        ("idle", "Processor seconds while nothing comes"),
        ("wake", "From push to Python, asleep, us"),
    ):
        runs = results.get(key, [])
        if runs:
            lines += ["", f"### {title}", "", "| what | |", "|---|---|"]
            for name in (name for name in runs[0] if name != "machine_busy"):
                lines.append(f"| {name} | {statistics.median(run[name] for run in runs):.3g} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="all ways that are installed, all sizes")
    parser.add_argument("--ours", action="store_true", help="no way but ours")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.1, help="for each cell")
    parser.add_argument(
        "--only",
        help="kinds, comma-separated: records,batches,pingpong,steps,paced,busy,engine,parked,idle,wake",
    )
    parser.add_argument(
        "--first", action="store_true", help="before all other work of the machine; needs root"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks.json")
    parser.add_argument("--append", action="store_true", help="add rounds to what is there")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    os.environ["BENCH_FIRST"] = "1" if args.first else "0"
    if args.first:
        # above what is measured: a way that polls must not keep us from telling its other side to start
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(20))
    results: dict[str, list[dict[str, float]]] = defaultdict(list)
    if (args.append or args.report) and args.out.exists():
        results.update(json.loads(args.out.read_text())["results"])
    if not args.report:
        with tempfile.TemporaryDirectory() as folder:
            reference = build_reference(folder)
            for _ in range(args.rounds):
                measure_round(args, reference, results)
                machine = f"{platform.machine()}, {os.cpu_count()} processors, Linux {platform.release()}, "
                machine += f"Python {platform.python_version()}"
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    print(report(results))


if __name__ == "__main__":
    main()
