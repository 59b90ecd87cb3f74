"""Peers from the package index, as ways (see ways.py). Taken if they are installed.

Each in the form that its own documents recommend. One that drops what a slow reader has not taken
(kickmsg) runs behind a window of credit.
"""

from __future__ import annotations

import os

from ways import (
    Nothing,
    OsPipe,
    Ours,
    OursLatency,
    OursSmaller,
    OursThrifty,
    Pipe,
    Queue,
    Way,
    until,
)


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
    Nothing,
    Ours,
    OursSmaller,
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
