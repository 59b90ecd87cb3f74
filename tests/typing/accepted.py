"""What users write. Checked by mypy, not run."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import shmring
from manager import (
    Arrivals,
    DeploymentEndedError,
    FinishCode,
    GenerateOutput,
    GenerateRequest,
    ManagerError,
    SamplingParams,
    SchedulerPort,
    Settings,
    TokenizerManager,
    decode_attachments,
    decode_extras,
)
from shmring import Column, Schema, Shape, WaitPolicy

POINTS = Schema(
    "points",
    1,
    [
        Column("ids", np.uint64),
        Column("counts", np.uint32),
        Column("values", np.float32, Shape.RAGGED, "counts"),
        Column("notes", np.uint8, Shape.FREE, is_optional=True),
    ],
)


def produce(name: str) -> None:
    with shmring.Producer.attach(name, timeout_s=5.0, policy=WaitPolicy.LATENCY) as producer:
        sent: bool = producer.push(b"bytes", 1.0)
        sent = producer.try_push(np.arange(3).data, 7)
        sent = producer.push(memoryview(bytearray(8)), timeout_s=None, type=1, flags=2)
        with producer.claim(100) or nothing() as claim:
            claim.payload[:4] = b"\0" * 4
            claim.commit(4, type=2)
        ids: npt.NDArray[np.uint64] = np.arange(2, dtype=np.uint64)
        sent = POINTS.push(producer, 2, ids, np.ones(2, np.uint32), np.zeros(2, np.float32), None)
        state: shmring.PeerState = producer.peer_state()
        fill: float = producer.statistics().fill
        print(sent, state, fill)


def consume(name: str, handle: Callable[[bytes], None]) -> None:
    with shmring.Consumer.attach(name, timeout_s=None) as consumer:
        for record in consumer:
            handle(record)
        one: bytes | None = consumer.pop(timeout_s=0.5)
        for drained in consumer.drain(16):
            frame: shmring.Frame = POINTS.read(drained)
            total: float = float(frame["values"].sum())
            rows: int = frame.rows
            print(one, total, rows, "notes" in frame)
        consumer.release()
        ready: list[shmring.Consumer | shmring.Producer | shmring.Bell] = shmring.wait_any([consumer], 1.0)
        print(ready)


async def consume_in_asyncio(consumer: shmring.Consumer) -> list[bytes]:
    waiter = shmring.AsyncWaiter()
    try:
        if await waiter.wait_until_readable(consumer, timeout_s=1.0):
            return [bytes(record) for record in consumer.drain(64)]
        return []
    finally:
        waiter.close()


async def pass_on(consumer: shmring.Consumer, producer: shmring.Producer) -> None:
    async for record in consumer:
        pushed: bool = await producer.push_async(record, timeout_s=1.0)
        print(pushed)
    one: bytes | None = await consumer.pop_async(timeout_s=1.0)
    several: list[shmring.Record] = await consumer.drain_async(8)
    print(one, several)


def look() -> dict[str, int]:
    return {
        info.name: info.statistics.used_bytes for info in shmring.list_rings() if info.statistics is not None
    }


async def serve(name: str) -> str:
    settings = Settings(name=name, workers=2, context_length=4096)
    request = GenerateRequest(text=["a", "b"], sampling_params=SamplingParams(max_new_tokens=8), stream=True)
    texts: list[str] = []
    async with TokenizerManager(settings, engine="echo") as manager:
        ready: bool = await manager.wait_until_ready(timeout_s=10.0)
        assert ready
        try:
            texts = [text_of(output) async for output in manager.generate(request)]
        except ManagerError as error:
            print(error.status)
        count: int = manager.abort("rid")
        print(count)
    return "".join(texts)


def text_of(output: GenerateOutput) -> str:
    return (
        output.text if output.finish_reason is None else f"{output.text}.{output.finish_reason.kind_name()}"
    )


def schedule(name: str) -> None:
    try:
        with SchedulerPort.attach(name, timeout_s=None) as port:
            while port.wait(timeout_s=1.0):
                arrivals: Arrivals = port.drain(max_requests=64)
                extras: list[dict[str, object]] = [decode_extras(data) for data in arrivals.extras]
                counts = np.ones(len(arrivals), np.uint32)
                codes = np.full(len(arrivals), FinishCode.LENGTH, np.uint8)
                values = np.ones(len(arrivals), np.int64)
                port.push_batch(arrivals.request_ids, counts, arrivals.prompt_ids, codes, values)
                attached: list[dict[str, object]] = [decode_attachments(d) for d in arrivals.attachments]
                print(extras, attached)
    except DeploymentEndedError as ended:
        print(ended.orderly)


def nothing() -> shmring.Claim:
    raise AssertionError
