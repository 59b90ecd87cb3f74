"""`python -m shmring.testing chaos|fuzz`: the test programs as commands. Exit code 0: all held."""

from __future__ import annotations

import argparse
import secrets
import sys

from shmring.testing import chaos, fuzz


def main(arguments: list[str] | None = None) -> int:
    """Run one program; its seed is printed first, so that a failure can be run again."""
    parser = argparse.ArgumentParser(prog="python -m shmring.testing", description=__doc__)
    programs = parser.add_subparsers(dest="program", required=True)
    one = programs.add_parser("chaos", help="kill the ends of a ring at random moments")
    one.add_argument("--kills", type=int, default=300, help="how many ends to kill (default: 300)")
    one.add_argument("--duration", type=float, default=None, metavar="SECONDS", help="stop after this time")
    other = programs.add_parser("fuzz", help="attach to damaged segments and use them")
    other.add_argument("--count", type=int, default=20_000, help="how many segments (default: 20000)")
    other.add_argument("--start", type=int, default=0, help="number of the first one (default: 0)")
    for program in (one, other):
        program.add_argument("--seed", type=int, default=None, help="repeat a run; default: a new one")
    chosen = parser.parse_args(arguments)
    seed = secrets.randbits(32) if chosen.seed is None else chosen.seed
    report: chaos.Report | fuzz.Report
    if chosen.program == "chaos":
        print(f"chaos: seed={seed}, kills={chosen.kills}", flush=True)
        report = chaos.run(chosen.kills, seed, duration_s=chosen.duration, progress=_say)
    else:
        print(f"fuzz: seed={seed}, start={chosen.start}, count={chosen.count}", flush=True)
        report = fuzz.run(chosen.count, seed, start=chosen.start, progress=_say)
    print(report.text())
    return 1 if report.failures else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
