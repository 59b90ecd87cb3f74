"""`generate`: a whole deployment for as long as it takes to answer some prompts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manager.cli.printing import Figures, JsonPrinter, PlainPrinter, Printer
from manager.cli.prompts import prompts_of
from manager.cli.sampling_options import add_options, sampling_of
from manager.config import Settings
from manager.engines.catalogue import ENGINE_NAMES
from manager.errors import ConfigError, ManagerError
from manager.request import GenerateRequest

if TYPE_CHECKING:
    import argparse

    from manager.tokenizer_manager import TokenizerManager

_READY_TIMEOUT_S = 60.0
_TOLD_AFTER_S = 1.0
_SIGNAL_EXIT = 128


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`python -m manager generate`."""
    parser = commands.add_parser(
        "generate", help="start a deployment, answer prompts, end it", description="Text in, text out."
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument("--file", metavar="FILE", help="one prompt a line; '-' is standard input")
    parser.add_argument("--name", help="the deployment's name; default: one of its own")
    parser.add_argument("--workers", type=int, metavar="N", help="detok workers (default 1)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json; default: the small embedded one"
    )
    parser.add_argument(
        "--engine",
        choices=(*ENGINE_NAMES, "none"),
        default="ngram",
        help="none: wait for somebody's scheduler to attach (default ngram)",
    )
    parser.add_argument(
        "--external-workers", action="store_true", help="wait for somebody's workers to attach"
    )
    parser.add_argument("--context-length", type=int, metavar="N", help="in tokens (default 8192)")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings as .json or .toml; options here win over it"
    )
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="requests at a time")
    parser.add_argument("--json", action="store_true", help="one JSON object a line at each request's end")
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="log probabilities of the new tokens, and of the N most likely ones; needs --json",
    )
    parser.add_argument("--verbose", action="store_true")
    add_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    sampling = sampling_of(options)
    if options.concurrency < 1:
        raise ConfigError(
            f"concurrency is out of range: value={options.concurrency}, min=1", setting="concurrency"
        )
    if options.logprobs is not None and not options.json:
        raise ConfigError("log probabilities are shown as JSON only: add --json", setting="logprobs")
    settings = _settings_of(options)
    return asyncio.run(_with_signals(options, settings, sampling))


def _settings_of(options: argparse.Namespace) -> Settings:
    given = {
        "name": options.name,
        "tokenizer": options.tokenizer,
        "workers": options.workers,
        "context_length": options.context_length,
    }
    default = {"name": f"manager-{os.getuid()}-{secrets.token_hex(4)}"}
    if options.config is not None:
        return Settings.from_file(options.config, default, **given)
    return Settings.from_mapping(default | {setting: v for setting, v in given.items() if v is not None})


async def _with_signals(options: argparse.Namespace, settings: Settings, sampling: dict[str, Any]) -> int:
    """Run until done or told to stop; the deployment is taken down in order either way."""
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(_generate(options, settings, sampling))
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not received:
            raise
        return _SIGNAL_EXIT + received[0]


async def _generate(options: argparse.Namespace, settings: Settings, sampling: dict[str, Any]) -> int:
    engine = None if options.engine == "none" else options.engine
    # here and not above: a worker's command must not load the tokenizer library
    from manager.tokenizer_manager import TokenizerManager  # noqa: PLC0415

    manager = TokenizerManager(settings, engine=engine, start_workers=not options.external_workers)
    try:
        await manager.start()
        await _await_parts(manager, settings, options)
        return await _answer_all(manager, settings, options, sampling)
    finally:
        closing = asyncio.ensure_future(manager.close())
        while not closing.done():
            # a second Ctrl-C must not leave anything behind either
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(closing)


async def _await_parts(manager: TokenizerManager, settings: Settings, options: argparse.Namespace) -> None:
    """Wait for all parts, and say for whom if it takes a while."""
    if await manager.wait_until_ready(_TOLD_AFTER_S):
        return
    for label in manager.missing_parts():
        part = (
            f"scheduler --name {settings.name} --engine ngram"
            if label == "scheduler"
            else f"worker --name {settings.name} --shard {label.split()[1]}"
        )
        is_external = options.engine == "none" if label == "scheduler" else options.external_workers
        if is_external:
            print(f"waiting for the {label} to attach: python -m manager {part}", file=sys.stderr)
    waits_for_others = options.engine == "none" or options.external_workers
    if not await manager.wait_until_ready(None if waits_for_others else _READY_TIMEOUT_S):
        raise ConfigError(
            f"parts did not start: missing={', '.join(manager.missing_parts())}", setting="name"
        )


async def _answer_all(
    manager: TokenizerManager, settings: Settings, options: argparse.Namespace, sampling: dict[str, Any]
) -> int:
    figures = Figures()
    is_single = len(options.prompts) == 1 and options.file is None and sampling.get("n", 1) == 1
    printer: Printer = (
        JsonPrinter(sys.stdout) if options.json else PlainPrinter(sys.stdout, is_single=is_single)
    )
    free = asyncio.Semaphore(options.concurrency)
    running: set[asyncio.Task[None]] = set()
    try:
        index = 0
        async for prompt in prompts_of(options):
            await free.acquire()
            _raise_first(running)
            if manager.missing_parts():
                # what it would be answered now is 503; the prompts can wait for a successor
                await _await_parts(manager, settings, options)
            request = GenerateRequest(
                text=prompt,
                sampling_params=sampling,
                stream=True,
                accumulated=False,
                return_logprob=options.logprobs is not None,
                return_text_in_logprobs=True,
                top_logprobs_num=options.logprobs,
            )
            task = asyncio.create_task(_answer(manager, index, request, printer, figures))
            running.add(task)
            task.add_done_callback(lambda _: free.release())
            index += 1
        if index == 0:
            raise ConfigError("no prompts: give some as arguments, with --file or on standard input")
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if figures.requests:
            print(figures.line(), file=sys.stderr)
    return 1 if figures.failed else 0


def _raise_first(running: set[asyncio.Task[None]]) -> None:
    """Drop the tasks that are done; one that failed (the reader of our output has gone) ends all."""
    for task in [task for task in running if task.done()]:
        running.discard(task)
        task.result()


async def _answer(
    manager: TokenizerManager,
    index: int,
    request: GenerateRequest,
    printer: Printer,
    figures: Figures,
) -> None:
    submitted_s = time.perf_counter()
    if figures.started_s is None:
        figures.started_s = submitted_s
    figures.requests += 1
    is_first = True
    counted: dict[int, int] = {}
    try:
        async with contextlib.aclosing(manager.generate(request)) as outputs:
            async for output in outputs:
                if is_first and output.completion_tokens:
                    figures.first_token_s.append(time.perf_counter() - submitted_s)
                    is_first = False
                figures.tokens += output.completion_tokens - counted.get(output.sample, 0)
                counted[output.sample] = output.completion_tokens
                if output.error is not None:
                    figures.failed += 1
                printer.piece(index, output)
    except ManagerError as error:
        figures.failed += 1
        printer.failure(index, error)
