"""From a scheduler's port to a manager that writes down what it is told, in one process on real rings."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

import shmring
from manager import BatchExtras, Logprobs, SchedulerPort, Settings, messages
from manager.deployment import Deployment, Facts, egress_name, register_name, reply_name
from manager.detokenize import load_decoder
from manager.inbox import Inbox
from manager.shard import DetokShard

if TYPE_CHECKING:
    from manager.errors import ManagerError
    from manager.extras import Extras

#: Every byte is an id of its own.
TOKENIZER = Tokenizer.from_file(str(Path(__file__).parents[1] / "data/detok/bytelevel_tiny.json"))


class OutputPath:
    """A deployment in one process: a scheduler's port, its shards, and a manager that writes down."""

    def __init__(
        self,
        name: str,
        *,
        shards: int = 1,
        ring_bytes: int = 1 << 16,
        reply_bytes: int | None = None,
        kind: Any = None,
    ) -> None:
        settings = Settings(
            name=name,
            workers=shards,
            context_length=1024,
            ingress_capacity_bytes=1 << 16,
            egress_capacity_bytes=ring_bytes,
            register_capacity_bytes=1 << 16,
            reply_capacity_bytes=reply_bytes or ring_bytes,
        )
        self._undo = contextlib.ExitStack()
        deployment = Deployment(settings, Facts(1000, (0,), None))
        self._undo.callback(deployment.close)
        enter = self._undo.enter_context
        enter(deployment.ring(f"{name}.ingress").producer(takeover=True))
        self.registers = [enter(deployment.ring(register_name(name, i)).producer()) for i in range(shards)]
        replies = [enter(deployment.ring(reply_name(name, i)).consumer(poison=True)) for i in range(shards)]
        self.port = enter(SchedulerPort.attach(name, continues_prompt=False))
        self.inboxes = [Inbox(reply, self) for reply in replies]
        decoder = load_decoder(TOKENIZER, kind=kind)
        self.shards = [
            DetokShard(
                egress=enter(shmring.Consumer.attach(egress_name(name, i), takeover=True, poison=True)),
                register=enter(shmring.Consumer.attach(register_name(name, i))),
                reply=enter(shmring.Producer.attach(reply_name(name, i))),
                decoder=decoder,
            )
            for i in range(shards)
        ]
        self.extras: dict[int, list[Extras]] = {}
        self.texts: dict[int, str] = {}
        self.failed: dict[int, ManagerError] = {}
        self.aborts: list[int] = []
        self.order: list[str] = []

    def close(self) -> None:
        self._undo.close()

    def register(self, *request_ids: int, texts: bool = False) -> None:
        for request_id in request_ids:
            assert messages.REGISTER.push(
                self.registers[request_id % len(self.registers)],
                1,
                np.array([request_id], np.uint64),
                np.array([(0, True, True, False, texts)], messages.OUTPUT_DTYPE),
                np.zeros(1, np.uint32),
                np.empty(0, np.int32),
                *messages.pack_bytes([b""]),
            )

    def push(self, ids: list[int], tokens: list[list[int]], extras: BatchExtras | None, **rest: Any) -> None:
        flat = [token for row in tokens for token in row]
        self.port.push_batch(ids, list(map(len, tokens)), flat, extras=extras, timeout_s=0, **rest)

    def work(self) -> None:
        busy = True
        while busy:
            busy = any([shard.do_work(1) for shard in self.shards] + [box.do_work(1) for box in self.inboxes])

    def on_text(self, request_id: int, text: str, *_: Any) -> None:
        self.texts[request_id] = self.texts.get(request_id, "") + text
        self.order.append(f"text {request_id}")

    def on_extras(self, request_id: int, extras: Extras) -> None:
        self.extras.setdefault(request_id, []).append(extras)
        self.order.append(f"extras {request_id}")

    def on_fail(self, request_id: int, error: ManagerError) -> None:
        assert request_id not in self.failed
        self.failed[request_id] = error

    def on_abort_asked(self, request_id: int) -> None:
        self.aborts.append(request_id)

    def on_result(self, control_id: int, payload: bytes) -> None:
        raise AssertionError(f"nobody asked: {control_id}, {payload!r}")

    def logprobs(self, request_id: int) -> Logprobs:
        (extras,) = self.extras[request_id]
        return extras.logprobs
