"""A deployment whose shared memory is overwritten under it: who is behind it is told, the rest goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from manager import GenerateRequest, InternalError, PartLostError, Settings, TokenizerManager
from shmring._native import ffi

pytestmark = pytest.mark.timeout(120)

TAIL_OFFSET = ffi.offsetof("struct shr_header", "tail")
HEAD_OFFSET = ffi.offsetof("struct shr_header", "head")
IMPOSSIBLE = (0x0877665544332211).to_bytes(8, "little")
REQUESTS = 6
NEW_TOKENS = 3000


def overwrite(ring: str, offset: int) -> None:
    """Write an impossible position over a good one."""
    fd = os.open(Path("/dev/shm") / f"shmring.{ring}", os.O_RDWR)
    try:
        os.pwrite(fd, IMPOSSIBLE, offset)
    finally:
        os.close(fd)


async def generate(manager: TokenizerManager, started: asyncio.Event) -> int:
    """Tokens of one long request; `started` once it streams."""
    request = GenerateRequest(
        text="Then the red coat said",
        sampling_params={"max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        stream=True,
    )
    tokens = 0
    async with contextlib.aclosing(manager.generate(request)) as outputs:
        async for output in outputs:
            started.set()
            tokens = output.completion_tokens
    return tokens


@pytest.mark.parametrize(
    ("ring", "offset"), [("reply.0", TAIL_OFFSET), ("egress.0", TAIL_OFFSET), ("ingress", HEAD_OFFSET)]
)
def test_a_damaged_ring_ends_the_requests_behind_it_and_no_others(ring_name: str, ring: str, offset: int):
    """One wild write into shared memory would hang clients, or take the whole server down."""

    async def work() -> None:
        settings = Settings(name=ring_name, workers=2)
        async with TokenizerManager(settings, engine="ngram") as manager:
            assert await manager.wait_until_ready(60)
            started = [asyncio.Event() for _ in range(REQUESTS)]
            tasks = [asyncio.create_task(generate(manager, event)) for event in started]
            await asyncio.gather(*(event.wait() for event in started))
            overwrite(f"{ring_name}.{ring}", offset)
            outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
            for outcome in outcomes:
                # the ends store their positions all the time, so a wild one may be gone unseen
                assert outcome == NEW_TOKENS or isinstance(outcome, (InternalError, PartLostError)), outcome
            # request ids count up from 1 and the shard is the remainder: the odd ones are on shard 1
            assert outcomes[0::2] == [NEW_TOKENS] * (REQUESTS // 2) or ring == "ingress"
            assert manager.in_flight_count == 0

    asyncio.run(asyncio.wait_for(work(), 100))


@pytest.mark.parametrize("ring", ["egress.0", "register.0", "reply.0", "ingress"])
def test_a_ring_that_was_cut_short_ends_the_requests_behind_it(ring_name: str, ring: str):
    """They would wait for ever, with every part looking well."""

    async def work() -> None:
        settings = Settings(name=ring_name, workers=2)
        async with TokenizerManager(settings, engine="ngram") as manager:
            assert await manager.wait_until_ready(60)
            started = [asyncio.Event() for _ in range(REQUESTS)]
            tasks = [asyncio.create_task(generate(manager, event)) for event in started]
            await asyncio.gather(*(event.wait() for event in started))
            os.truncate(Path("/dev/shm") / f"shmring.{ring_name}.{ring}", 4096)
            outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
            for outcome in outcomes:
                assert outcome == NEW_TOKENS or isinstance(outcome, (InternalError, PartLostError)), outcome
            if ring != "ingress":
                assert outcomes[0::2] == [NEW_TOKENS] * (REQUESTS // 2)
            assert not manager.health()["worker 0"].is_healthy
            assert manager.in_flight_count == 0

    asyncio.run(asyncio.wait_for(work(), 100))
