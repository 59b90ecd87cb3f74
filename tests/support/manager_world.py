"""The tokenizer manager in one process with everything it speaks to: a test plays the scheduler.

Rings, shards and the scheduler's port are the real ones; only their processes are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

import shmring
from manager import GenerateRequest, SchedulerPort, Settings, TokenizerManager, decode_attachments
from manager.deployment import egress_name, register_name, reply_name
from manager.detokenize import load_decoder
from manager.finish import FinishReason, encode
from manager.shard import DetokShard

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from typing_extensions import Self

    from manager.scheduler_port import Arrivals

TOKENIZER = Path(__file__).parents[1] / "data/detok/bytelevel_tiny.json"
LENGTH = FinishReason.length


class Client:
    """Reads one request's output in a task of its own."""

    def __init__(self, manager: TokenizerManager, **request: Any) -> None:
        self.pieces: list[Any] = []
        self.error: BaseException | None = None
        self.is_done = False
        request.setdefault("stream", True)
        self.task = asyncio.create_task(self._read(manager, GenerateRequest(**request)))

    async def _read(self, manager: TokenizerManager, request: GenerateRequest) -> None:
        try:
            async with contextlib.aclosing(manager.generate(request)) as outputs:
                async for output in outputs:
                    self.pieces.append(output)
        except BaseException as error:
            self.error = error
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self.is_done = True

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def reason(self) -> Any:
        """How it ended: the mapping of its last piece."""
        return self.pieces[-1].finish_reason.to_mapping()

    async def end(self) -> Client:
        await asyncio.wait_for(asyncio.wait([self.task]), 4)
        return self

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


class World:
    """A manager, its shards and a scheduler that does what it is told."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.manager = TokenizerManager(
            Settings(**{"name": name, "tokenizer": TOKENIZER, "workers": 2, **settings}), start_workers=False
        )
        self._name = name
        self._shards: list[DetokShard] = []
        self._ends = contextlib.ExitStack()
        self._done = 0
        self.is_paused = False  # whether the workers do nothing
        self.requests: dict[str, int] = {}
        self.attachments: dict[str, dict[str, Any]] = {}
        self.aborts: list[int] = []

    async def __aenter__(self) -> Self:
        await self.manager.start()
        self.port = self._ends.enter_context(SchedulerPort.attach(self._name, continues_prompt=False))
        decoder = None
        if self.manager.limits.has_tokenizer:
            decoder = load_decoder(Tokenizer.from_file(str(TOKENIZER)))
        for shard in range(self.port.shards):
            egress = shmring.Consumer.attach(egress_name(self._name, shard), takeover=True)
            register = shmring.Consumer.attach(register_name(self._name, shard))
            reply = shmring.Producer.attach(reply_name(self._name, shard), takeover=True)
            for end in (egress, register, reply):
                self._ends.enter_context(end)
            self._shards.append(DetokShard(egress=egress, register=register, reply=reply, decoder=decoder))
        assert await self.manager.wait_until_ready(10)
        self._worker = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._worker.cancel()
        await asyncio.wait([self._worker])
        await self.manager.close()
        self._ends.close()

    async def _work(self) -> None:
        """What the workers' processes do."""
        while True:
            with contextlib.suppress(shmring.EndOfRing):  # the manager was closed
                self._done = 0 if self.is_paused else sum(shard.do_work(64) for shard in self._shards)
            await asyncio.sleep(0.0002)

    @property
    def registered_count(self) -> int:
        """Requests that any worker was ever told of."""
        return sum(shard.counters.registered for shard in self._shards)

    @property
    def open_count(self) -> int:
        """Requests that the workers know of."""
        return sum(shard.open_count for shard in self._shards)

    def is_empty(self) -> bool:
        """Nothing is kept anywhere of any request."""
        manager = self.manager
        return not (manager._streams or manager._rids or manager._outbox.kept_count or self.open_count)

    def drain(self) -> None:
        """Take what has come to the scheduler."""
        arrivals = self.port.drain(1000)
        self.requests.update(zip(arrivals.rids, arrivals.request_ids.tolist(), strict=True))
        self.attachments.update(
            zip(arrivals.rids, map(decode_attachments, arrivals.attachments), strict=True)
        )
        self.aborts += arrivals.aborts.tolist()

    async def settle(self) -> None:
        """Let everybody work until nothing moves any more."""
        quiet = 0
        while quiet < 3:
            self.drain()
            waiting = any(
                shmring.read_statistics(reply_name(self._name, shard)).used_bytes
                for shard in range(len(self._shards))
            )
            quiet = 0 if self._done or waiting or self.manager._outbox.kept_count else quiet + 1
            await asyncio.sleep(0.001)

    async def next_arrivals(self) -> Arrivals:
        """Wait for requests to come to the scheduler, and take them as it does."""
        while not len(arrivals := self.port.drain(1000)):
            await asyncio.sleep(0.0005)
        self.requests.update(zip(arrivals.rids, arrivals.request_ids.tolist(), strict=True))
        self.aborts += arrivals.aborts.tolist()
        return arrivals

    async def arrive(self, *rids: str) -> None:
        """Wait until these requests are with the scheduler."""
        while not set(rids) <= set(self.requests):
            await asyncio.sleep(0.0005)
            self.drain()

    def push(self, rid: str, text: str | list[int], reason: FinishReason | None = None) -> None:
        """One step of one request."""
        ids = list(text.encode()) if isinstance(text, str) else text
        code, value, details = encode(reason)
        self.port.push_batch(
            [self.requests[rid]], [len(ids)], ids, [code], [value], [details] if details else None
        )


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 8))
    gc.collect()


class Gate:
    """A tokenizer that waits until it is told to go on."""

    def __init__(self, manager: TokenizerManager) -> None:
        tokenizer = manager._intake._tokenizer
        assert tokenizer is not None
        self._open = threading.Event()
        self.entered = threading.Event()
        gate, real = self, tokenizer

        class Gated:
            def encode(self, texts: Any) -> Any:
                gate.entered.set()
                assert gate._open.wait(20)
                return real.encode(texts)

        manager._intake._tokenizer = Gated()  # type: ignore[assignment]

    async def wait(self) -> None:
        while not self.entered.is_set():
            await asyncio.sleep(0.001)

    def open(self) -> None:
        self._open.set()
