"""One class for each way to carry records from one process to another. All look alike to measure.py.

A way is made in the parent, pickled into two fresh processes, and becomes the writer in one and the
reader in the other. `send(payload)` waits while there is no room; `recv()` waits for the next record
and returns something that can be indexed; `release`, if it is not None, gives it back.
`send_step(columns)` and `recv_step()` carry a decode step of five columns in the way's own best form.

Here are ours and the library's own; those of others are in peers.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pickle
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import shmring
from shmring import Column, Schema, Shape, WaitPolicy

CAPACITY = 8 << 20
STEP = Schema(
    "step",
    1,
    [
        Column("request_ids", np.uint64),
        Column("token_counts", np.uint32),
        Column("token_ids", np.int32, Shape.RAGGED, "token_counts"),
        Column("finish_codes", np.uint8),
        Column("finish_values", np.int64),
    ],
)


def make_step(rows: int) -> tuple[np.ndarray, ...]:
    return (
        np.arange(1, rows + 1, dtype=np.uint64),
        np.ones(rows, np.uint32),
        np.arange(rows, dtype=np.int32),
        np.zeros(rows, np.uint8),
        np.zeros(rows, np.int64),
    )


def slots_for(size: int) -> int:
    return max(8, min(1024, CAPACITY // size))


def until(ready, timeout_s: float = 10.0):
    """Call `ready` until it neither raises nor returns None."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            found = ready()
        except Exception:
            if time.monotonic() > end_s:
                raise
        else:
            if found is not None:
                return found
        time.sleep(0.002)


class Columns:
    """A row count and the columns' bytes back to back: the cheapest that numpy alone can do."""

    @staticmethod
    def encode(columns):
        return b"".join((len(columns[0]).to_bytes(8, "little"), *columns))

    @staticmethod
    def decode(buffer):
        rows = int.from_bytes(buffer[:8], "little")
        at, found = 8, []
        for dtype in STEP.dtypes:
            found.append(np.frombuffer(buffer, dtype, rows, at))
            at += rows * dtype.itemsize
        return found


@dataclasses.dataclass
class Lists:
    """What an engine pickles that hands over objects."""

    request_ids: list[int]
    token_ids: list[list[int]]
    finish_codes: list[int]
    finish_values: list[int]


def lists_of(columns) -> Lists:
    ids, _, tokens, codes, values = columns
    return Lists(ids.tolist(), [[t] for t in tokens.tolist()], codes.tolist(), values.tolist())


class Pickle:
    """Lists in a dataclass, pickled."""

    encode = staticmethod(lambda lists: pickle.dumps(lists, pickle.HIGHEST_PROTOCOL))
    decode = staticmethod(lambda buffer: (pickle.loads(buffer).request_ids,))


class Msgspec:
    """The same lists, typed, as MessagePack."""

    def __init__(self):
        import msgspec

        self.encode = msgspec.msgpack.Encoder().encode
        decoder = msgspec.msgpack.Decoder(Lists)
        self.decode = lambda buffer: (decoder.decode(buffer).request_ids,)


class Way:
    name: ClassVar[str]
    package: ClassVar[str | None] = None
    modes: ClassVar[tuple[str, ...]] = ("block",)
    codecs: ClassVar[tuple[str, ...]] = ("columns",)
    is_lossy: ClassVar[bool] = False
    has_batches: ClassVar[bool] = False
    release: Any = None

    def __init__(self, channel: str, size: int, folder: str) -> None:
        self.channel, self.size, self.folder = channel, size, folder
        self.slots = slots_for(size)
        self.codec: Any = None

    @classmethod
    def is_installed(cls) -> bool:
        return cls.package is None or importlib.util.find_spec(cls.package) is not None

    def set_up(self, context: Any) -> None: ...
    def tear_down(self) -> None: ...
    def write(self, mode: str) -> None: ...
    def read(self, mode: str) -> None: ...
    def close(self) -> None: ...

    def use(self, codec: str) -> None:
        self.codec = {"columns": Columns, "pickle": Pickle, "msgspec": Msgspec}[codec]()

    def make_step(self, rows: int) -> Any:
        columns = make_step(rows)
        return columns if isinstance(self.codec, Columns) else lists_of(columns)

    def send_step(self, step: Any) -> None:
        self.send(self.codec.encode(step))

    def recv_step(self) -> Any:
        return self.codec.decode(self.recv())

    @property
    def ring_bytes(self) -> int:
        return 1 << (self.slots * (self.size + 128) - 1).bit_length()

    def path(self, suffix: str) -> str:
        return str(Path(self.folder) / (self.channel + suffix))


class Ours(Way):
    """Push copies in; small records are copied out by pop, large ones read in place."""

    name, modes, codecs, has_batches = "shmring", ("block", "spin"), ("frame", "columns"), True
    policy = WaitPolicy.BALANCED

    @property
    def ring_bytes(self):
        """As the others have it, but not beyond 8 MiB, where a ring no longer fits in this cache."""
        return min(CAPACITY, super().ring_bytes)

    def set_up(self, context):
        _made[self.channel] = shmring.create(self.channel, self.ring_bytes)

    def tear_down(self):
        _made.pop(self.channel).close()

    def write(self, mode):
        self.end = end = shmring.Producer.attach(self.channel, policy=self.policy, timeout_s=10)
        until(lambda: True if end.peer_state() is shmring.PeerState.ATTACHED else None)
        if mode == "block":
            self.send = end.push
        else:
            try_push = end.try_push

            def send(payload):
                while not try_push(payload):
                    pass

            self.send = send

        def send_many(payloads):
            done = end.push_many(payloads)
            while done < len(payloads):
                end.wait_until_writable(len(payloads[done]))
                done += end.push_many(payloads[done:])

        self.send_many = send_many

    def read(self, mode):
        self.end = end = shmring.Consumer.attach(self.channel, policy=self.policy, timeout_s=10)
        self.in_place = self.size > 2048 or mode == "frame"
        drain = end.drain_wait if mode == "block" else end.drain

        def recv_record():
            while True:
                records = drain(1)
                if records:
                    return records[0]

        self.recv_record = recv_record
        if self.size > 2048:
            self.release, self.recv = end.release, recv_record
        elif mode == "block":
            self.recv = end.pop
        else:
            try_pop = end.try_pop

            def recv():
                while True:
                    record = try_pop()
                    if record is not None:
                        return record

            self.recv = recv

        def recv_many():
            while True:
                records = end.pop_many(64)
                if records:
                    return records
                end.wait_until_readable()

        self.recv_many = recv_many

    def use(self, codec):
        if codec != "frame":
            super().use(codec)
            return
        self.codec = Columns()
        end, push, read = self.end, STEP.push, STEP.read

        def send_step(columns):
            ids, counts, tokens, codes, values = columns
            push(end, len(ids), ids, counts, tokens, codes, values, timeout_s=None)

        def recv_step():
            return read(self.recv_record()).columns()

        self.send_step = send_step
        if isinstance(end, shmring.Consumer):
            self.recv_step, self.release = recv_step, end.release

    def close(self):
        self.end.close()


class OursLatency(Ours):
    name, policy, codecs, modes = "shmring latency", WaitPolicy.LATENCY, ("frame",), ("block",)


class OursThrifty(Ours):
    name, policy, codecs, modes = "shmring thrifty", WaitPolicy.THRIFTY, ("frame",), ("block",)


class OursSmaller(Ours):
    """With room for a few large records only, so that the ring stays in the cache of one core."""

    name, codecs, modes = "shmring of 2 MiB", (), ("block", "spin")

    @property
    def ring_bytes(self):
        return 2 << 20


_made: dict[str, Any] = {}


class Nothing(Way):
    """Carries nothing, at no cost: what is left when a way is taken out of a measurement."""

    name = "nothing"

    def use(self, codec):
        self.send_step = lambda _: None
        self.recv_step = lambda: ([self._rows],)

    _rows = 256


class Queue(Way):
    name, codecs = "multiprocessing.Queue", ("pickle", "columns")

    def set_up(self, context):
        self.queue = context.Queue(self.slots)

    def write(self, mode):
        self.send = self.queue.put

    def read(self, mode):
        self.recv = self.queue.get

    def close(self):
        self.queue.close()
        self.queue.join_thread()


class Pipe(Way):
    name, codecs = "multiprocessing.Pipe", ("pickle", "columns")

    def set_up(self, context):
        self.reader, self.writer = context.Pipe(duplex=False)

    def write(self, mode):
        self.send = self.writer.send_bytes

    def read(self, mode):
        self.recv = self.reader.recv_bytes


class OsPipe(Way):
    """A pipe of 1 MiB with the length in front, read into one buffer."""

    name, modes = "os.pipe", ("block", "spin")

    def set_up(self, context):
        import fcntl

        self.reader, self.writer = context.Pipe(duplex=False)
        fcntl.fcntl(self.writer.fileno(), 1031, 1 << 20)  # F_SETPIPE_SZ

    def write(self, mode):
        fd = self.writer.fileno()

        def send(payload):
            length = len(payload)
            done = os.writev(fd, (length.to_bytes(4, "little"), payload)) - 4
            rest = memoryview(payload)
            while done < length:
                done += os.write(fd, rest[done:])

        self.send = send

    def read(self, mode):
        fd = self.reader.fileno()
        os.set_blocking(fd, mode == "block")
        head, store = memoryview(bytearray(4)), memoryview(bytearray(self.size + 4096))

        def fill(view):
            while view:
                with contextlib.suppress(BlockingIOError):
                    view = view[os.readv(fd, (view,)) :]

        def recv():
            fill(head)
            payload = store[: int.from_bytes(head, "little")]
            fill(payload)
            return payload

        self.recv = recv
