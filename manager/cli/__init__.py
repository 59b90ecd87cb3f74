"""The command `python -m manager`: generate, and the parts of a deployment one by one.

An error is one line on stderr that names what is wrong; the exit code is 1, or 2 for words that
no command has. No error leaves anything in shared memory.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from typing import TYPE_CHECKING

from manager.cli import generate, parts
from manager.errors import ManagerError
from shmring import ShmringError

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # as a shell says it of a command that SIGPIPE ended


def _make_streams_safe() -> None:
    """A closed stream is one that nobody reads; a character that the terminal cannot show is escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m manager", description="The request path of an LLM server, over shared-memory rings."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    generate.add_command(commands)
    parts.add_scheduler_command(commands)
    parts.add_worker_command(commands)
    options = parser.parse_args(arguments)
    _make_streams_safe()
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except (ManagerError, ShmringError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # whoever read us has gone; the interpreter must not complain of it at exit either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_BROKEN_PIPE
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code
