"""Where `generate` takes its prompts from: arguments, a file, or standard input, line by line."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING, TextIO

from manager.errors import ValidationError

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

_LINES_AHEAD = 256


async def prompts_of(options: argparse.Namespace) -> AsyncIterator[str]:
    """Yield the prompts in order. Blank lines of a file or of standard input are no prompts.

    Standard input is read as it comes, so a slow writer's first prompt is served at once.
    """
    for prompt in options.prompts:
        yield prompt
    if options.file is not None and options.file != "-":
        try:
            with open(options.file, encoding="utf-8") as file:  # noqa: ASYNC230, PTH123 - a local file
                lines = [line.rstrip("\r\n") for line in file]
        except UnicodeDecodeError as error:
            raise ValidationError(
                f"file is not UTF-8: file={options.file}, why={error}", field="file"
            ) from error
        for line in lines:
            if line.strip():
                yield line
    elif options.file == "-" or not options.prompts:
        async for line in _lines_of(sys.stdin):
            if line.strip():
                yield line


async def _lines_of(file: TextIO | None) -> AsyncIterator[str]:
    """Read lines in a thread that nobody waits for: a read of a terminal cannot be cancelled."""
    if file is None:
        raise ValidationError("standard input is closed", field="stdin")
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str | Exception | None] = asyncio.Queue(_LINES_AHEAD)

    def put(item: str | Exception | None) -> None:
        asyncio.run_coroutine_threadsafe(lines.put(item), loop).result()

    def read() -> None:
        try:
            for line in file:
                put(line.rstrip("\r\n"))
            put(None)
        except UnicodeDecodeError as error:
            put(ValidationError(f"standard input is not UTF-8: why={error}", field="stdin"))
        except OSError as error:
            put(ValidationError(f"standard input cannot be read: why={error}", field="stdin"))
        except RuntimeError:
            return  # the loop is closed: nobody wants more

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while True:
        item = await lines.get()
        if item is None:
            return
        if isinstance(item, Exception):
            raise item
        yield item
