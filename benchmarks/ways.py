"""One class for each way to carry records from one process to another. All look alike to measure.py.

A way is made in the parent, pickled into two fresh processes, and becomes the writer in one and the
reader in the other. `send(payload)` waits while there is no room; `recv()` waits for the next record
and returns something that can be indexed; `release`, if it is not None, gives it back.
`send_step(columns)` and `recv_step()` carry a decode step of five columns in the way's own best form.

Peers are taken if they are installed, in the form that their own documents recommend. One that drops
what a slow reader has not taken (kickmsg) runs behind a window of credit.
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
        if self.size > 2048:
            self.release = end.release

            def recv():
                while True:
                    records = drain(1)
                    if records:
                        return records[0]

            self.recv = recv
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
        end, length = self.end, STEP.payload_length
        push, read = STEP.push, STEP.read

        def send_step(columns):
            while not push(end, len(columns[0]), *columns):
                end.wait_until_writable(length(*columns))

        def recv_step():
            return read(end.drain_wait(1)[0]).columns()

        self.send_step = send_step
        if isinstance(end, shmring.Consumer):
            self.recv_step, self.release = recv_step, end.release

    def close(self):
        self.end.close()


class OursLatency(Ours):
    name, policy, codecs, modes = "shmring latency", WaitPolicy.LATENCY, ("frame",), ("block",)


class OursThrifty(Ours):
    name, policy, codecs, modes = "shmring thrifty", WaitPolicy.THRIFTY, ("frame",), ("block",)


_made: dict[str, Any] = {}


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


class Zmq(Way):
    """PUSH and PULL over a Unix socket, as several LLM servers link their processes."""

    name, package, codecs = "zmq", "zmq", ("pickle", "msgspec", "columns")

    def _socket(self, kind):
        import zmq

        self.zmq = zmq.Context()
        self.socket = self.zmq.socket(kind)
        self.socket.set_hwm(self.slots)

    def write(self, mode):
        import zmq

        self._socket(zmq.PUSH)
        self.socket.connect("ipc://" + self.path(".ipc"))
        copy, send = self.size < 65536, self.socket.send
        self.send = lambda payload: send(payload, copy=copy)

    def read(self, mode):
        import zmq

        self._socket(zmq.PULL)
        self.socket.bind("ipc://" + self.path(".ipc"))
        recv = self.socket.recv
        self.recv = recv if self.size < 65536 else lambda: recv(copy=False).buffer

    def close(self):
        self.socket.close(linger=5000)
        self.zmq.term()


class FasterFifo(Way):
    name, package = "faster-fifo", "faster_fifo"

    def set_up(self, context):
        import faster_fifo

        self.queue = faster_fifo.Queue(max_size_bytes=self.ring_bytes, loads=bytes, dumps=_same)

    def write(self, mode):
        import queue

        put = self.queue.put

        def send(payload):
            while True:
                try:
                    return put(payload)
                except queue.Full:
                    pass

        self.send = send

    def read(self, mode):
        import queue

        get = self.queue.get

        def recv():
            while True:
                try:
                    return get()
                except queue.Empty:
                    pass

        self.recv = recv


def _same(payload):
    return payload


class Interprocess(Way):
    name, package = "cloudtoid-interprocess", "cloudtoid_interprocess"
    modes, has_batches = ("block", "spin"), True

    def write(self, mode):
        import cloudtoid_interprocess as ci

        self.end = ci.Publisher(self.channel, self.ring_bytes, self.folder)
        try_send, try_many = self.end.try_send, self.end.try_send_batch

        def send(payload):
            while not try_send(payload):
                os.sched_yield()

        def send_many(payloads):
            done = 0
            while done < len(payloads):
                done += try_many(payloads[done:] if done else payloads)

        self.send, self.send_many = send, send_many

    def read(self, mode):
        import cloudtoid_interprocess as ci

        self.end = ci.Subscriber(self.channel, self.ring_bytes, self.folder)
        receive, try_receive = self.end.receive, self.end.try_receive

        def recv():
            while True:
                payload = receive(60.0) if mode == "block" else try_receive()
                if payload is not None:
                    return payload

        self.recv = recv
        self.recv_many = lambda: (recv(),)

    def close(self):
        self.end.close()


class Membridge(Way):
    """Has no wait, so both sides poll."""

    name, package, modes = "membridge", "membridge", ("spin",)

    def set_up(self, context):
        import membridge

        membridge.SharedMemory.create("/" + self.channel, self.ring_bytes + 24).spsc()

    def write(self, mode):
        import membridge

        self.memory = membridge.SharedMemory.open("/" + self.channel, self.ring_bytes + 24)
        push = self.memory.spsc().push

        def send(payload):
            while not push(payload):
                os.sched_yield()

        self.send = send

    def read(self, mode):
        import membridge

        self.memory = membridge.SharedMemory.open("/" + self.channel, self.ring_bytes + 24)
        pop = self.memory.spsc().pop

        def recv():
            while True:
                payload = pop()
                if payload is not None:
                    return payload

        self.recv = recv

    def tear_down(self):
        import membridge

        membridge.SharedMemory.remove("/" + self.channel)


class Kickmsg(Way):
    name, package, modes, is_lossy = "kickmsg", "kickmsg", ("block", "spin"), True

    def _region(self):
        import kickmsg

        config = kickmsg.Config()
        config.max_subscribers = 1
        config.sub_ring_capacity = 1 << (self.slots - 1).bit_length()
        config.pool_size = 2 * config.sub_ring_capacity
        config.max_payload_size = self.size
        return kickmsg.SharedRegion.create_or_open("/" + self.channel, kickmsg.ChannelType.PubSub, config)

    def write(self, mode):
        import kickmsg

        self.region = self._region()
        self.end = kickmsg.Publisher(self.region)
        until(lambda: True if self.region.stats().live_rings else None)
        self.send = self.end.send

    def read(self, mode):
        import kickmsg

        self.region = self._region()
        self.end = kickmsg.Subscriber(self.region)
        receive, poll = self.end.receive_view, self.end.try_receive_view

        def recv():
            while True:
                view = receive(60.0) if mode == "block" else poll()
                if view is not None:
                    self.view = view
                    return memoryview(view)

        def release():
            self.view.release()

        self.recv, self.release = recv, release

    def tear_down(self):
        import kickmsg

        kickmsg.unlink_shm("/" + self.channel)


class Iceoryx2(Way):
    """Publish and subscribe of byte slices; to wait it needs an event service beside them."""

    name, package, modes = "iceoryx2", "iceoryx2", ("spin", "block")

    def _open(self):
        import ctypes

        import iceoryx2 as iox

        iox.set_log_level(iox.LogLevel.Error)
        self.node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
        self.service = (
            self.node.service_builder(iox.ServiceName.new(self.channel))
            .publish_subscribe(iox.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .history_size(0)
            .subscriber_max_buffer_size(self.slots)
            .max_publishers(1)
            .max_subscribers(1)
            .open_or_create()
        )
        self.event = (
            self.node.service_builder(iox.ServiceName.new(self.channel + "-e")).event().open_or_create()
        )
        return iox, ctypes

    def write(self, mode):
        iox, ctypes = self._open()
        self.end = until(
            lambda: (
                self.service.publisher_builder()
                .initial_max_slice_len(self.size)
                .backpressure_strategy(iox.BackpressureStrategy.RetryUntilDelivered)
                .create()
            )
        )
        loan, move = self.end.loan_slice_uninit, ctypes.memmove
        self.notifier = self.event.notifier_builder().create() if mode == "block" else None
        until(lambda: True if self.service.dynamic_config.number_of_subscribers else None)

        def send(payload):
            length = len(payload)
            sample = loan(length)
            move(sample.payload_ptr, payload, length)
            sample.assume_init().send()
            if self.notifier is not None:
                self.notifier.notify()

        self.send = send

    def read(self, mode):
        self._open()
        self.end = self.service.subscriber_builder().create()
        self.listener = self.event.listener_builder().create() if mode == "block" else None
        receive = self.end.receive

        def recv():
            while True:
                sample = receive()
                if sample is not None:
                    self.sample = sample
                    return sample.payload().as_memory_view().cast("B")
                if self.listener is not None:
                    self.listener.blocking_wait()

        def release():
            self.sample.delete()

        self.recv, self.release = recv, release

    def close(self):
        self.end.delete()
        self.__dict__.clear()  # the node removes its files when nothing refers to it


class Tachyon(Way):
    """Needs a newer compiler than many have to be installed at all."""

    name, package, modes = "tachyon-ipc", "tachyon", ("block", "spin")

    def write(self, mode):
        import tachyon

        self.bus = until(lambda: tachyon.Bus.connect(self.path(".bus")))
        if mode == "spin":
            self.bus.set_polling_mode(1)
        send_once, full = self.bus.send, tachyon.TachyonError

        def send(payload):
            while True:
                try:
                    return send_once(payload)
                except full:
                    os.sched_yield()

        self.send = send

    def read(self, mode):
        import tachyon

        least = 1 << (64 * (self.size + 128) - 1).bit_length()
        self.bus = tachyon.Bus.listen(self.path(".bus"), max(self.ring_bytes, least))
        if mode == "spin":
            self.bus.set_polling_mode(1)

        def recv():
            self.guard = self.bus.recv_zero_copy()
            self.guard.__enter__()
            self.view = memoryview(self.guard)
            return self.view

        def release():
            self.view.release()
            self.guard.__exit__(None, None, None)

        self.recv, self.release = recv, release

    def close(self):
        self.bus.__exit__(None, None, None)


WAYS: list[type[Way]] = [
    Ours,
    OursLatency,
    OursThrifty,
    Queue,
    Pipe,
    OsPipe,
    Zmq,
    FasterFifo,
    Interprocess,
    Membridge,
    Kickmsg,
    Iceoryx2,
    Tachyon,
]
