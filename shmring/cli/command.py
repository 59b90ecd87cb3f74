"""The command line: arguments in, text or JSON out, one line and an exit code for what went wrong.

Exit codes: 0 done, 1 not found, damaged or not allowed, 2 usage; 130 and 141 as a shell has
them for Ctrl-C and for a reader that went away.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from shmring._native import lib
from shmring.cli.inspection import inspection_lines, ring_json
from shmring.cli.leftovers import is_leftover, run_sweep, sweep_json, sweep_lines
from shmring.cli.listing import listing_json, listing_lines
from shmring.cli.live import run_top
from shmring.cli.selection import no_ring, not_found, select
from shmring.cli.terminal import Terminal
from shmring.cli.units import escaped
from shmring.errors import BadNameError, LayoutMismatchError, SegmentNotFoundError, ShmringError
from shmring.layout import Kind
from shmring.ring import list_rings, read_statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + 2
EXIT_READER_GONE = 128 + 13
#: A look costs microseconds for each ring; more often than this nobody can read.
INTERVAL_MIN_S = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: nobody reads it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        code = run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # what is still buffered goes nowhere, without a word from the interpreter at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_READER_GONE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BadNameError as error:
        return _fail(error, EXIT_USAGE)
    except (ShmringError, OSError) as error:
        return _fail(error, EXIT_FAILED)
    return code


def _fail(error: Exception, code: int) -> int:
    print(f"shmring: {escaped(str(error))}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shmring",
        description="Look at the rings in this machine's shared memory. Only `sweep` changes anything.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and leave")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    ls = commands.add_parser("ls", help="every ring and blob, a line each", allow_abbrev=False)
    ls.add_argument("name", nargs="?", metavar="NAME", help="a ring, or a deployment: NAME and NAME.*")
    ls.add_argument("--all", action="store_true", help="also segments that are not finished")
    ls.set_defaults(run=_run_ls)

    stat = commands.add_parser("stat", help="everything of one ring", allow_abbrev=False)
    stat.add_argument("name", metavar="NAME", help="a ring")
    stat.set_defaults(run=_run_stat)

    top = commands.add_parser("top", help="rates, again and again", allow_abbrev=False)
    top.add_argument("name", nargs="?", metavar="NAME", help="a ring, or a deployment: NAME and NAME.*")
    top.add_argument("--interval", type=_interval, default=1.0, metavar="S", help="seconds (default: 1)")
    top.add_argument("--once", action="store_true", help="one frame, after one interval")
    top.set_defaults(run=_run_top)

    sweep = commands.add_parser("sweep", help="remove what dead owners left behind", allow_abbrev=False)
    sweep.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    sweep.set_defaults(run=_run_sweep)

    for command in (ls, stat, sweep):
        command.add_argument("--json", action="store_true", help="for programs: raw integers, stable keys")
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked: it reads the installed metadata."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        try:
            version = importlib.metadata.version("shmring")
        except importlib.metadata.PackageNotFoundError:  # run from its source
            version = "(not installed)"
        print(f"shmring {version}, layout {lib.SHR_LAYOUT_VERSION}")
        parser.exit(EXIT_DONE)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not INTERVAL_MIN_S <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"seconds, at least {INTERVAL_MIN_S}: {text!r}")
    return seconds


def _print_lines(lines: Sequence[str]) -> None:
    print("\n".join(lines))


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))


def _run_ls(options: argparse.Namespace) -> int:
    everything = list_rings()
    infos = [info for info in everything if options.all or info.kind != "unfinished"]
    infos = select(infos, options.name)
    leftovers = {info.name for info in infos if is_leftover(info)}
    if options.json:
        _print_json(listing_json(infos, leftovers))
    else:
        is_partial = options.all or options.name is not None
        hidden_count = 0 if is_partial else len(everything) - len(infos)
        _print_lines(listing_lines(infos, leftovers, hidden_count, Terminal.of(sys.stdout)))
    return EXIT_DONE


def _run_stat(options: argparse.Namespace) -> int:
    try:
        ring = read_statistics(options.name)
    except SegmentNotFoundError:
        raise not_found(options.name, (info.name for info in list_rings())) from None
    except LayoutMismatchError as error:
        if error.found != Kind.BLOB:
            raise
        raise no_ring(options.name, (info.name for info in list_rings())) from None
    if options.json:
        _print_json(ring_json(ring))
    else:
        _print_lines(inspection_lines(ring, Terminal.of(sys.stdout)))
    return EXIT_DONE


def _run_top(options: argparse.Namespace) -> int:
    select(list_rings(), options.name)  # a name that matches nothing is an error; later it may come back
    with contextlib.suppress(KeyboardInterrupt):  # the ordinary way out
        run_top(options.name, options.interval, once=options.once, stream=sys.stdout)
    return EXIT_DONE


def _run_sweep(options: argparse.Namespace) -> int:
    results = run_sweep(dry_run=options.dry_run)
    if options.json:
        _print_json(sweep_json(results, dry_run=options.dry_run))
    else:
        _print_lines(sweep_lines(results, dry_run=options.dry_run))
    is_refused = not options.dry_run and not all(is_removed for _, is_removed in results)
    return EXIT_FAILED if is_refused else EXIT_DONE
