"""What a deployment costs while nobody asks it anything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import shmring
from manager import GenerateRequest, Settings, TokenizerManager

if TYPE_CHECKING:
    from collections.abc import Coroutine

IDLE_S = 10.0
CPU_MAX_S = 0.1
"""Of each process, in IDLE_S."""


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def first_piece_s(manager: TokenizerManager) -> float:
    """Seconds from a request to its first piece."""
    started = time.perf_counter()
    async with contextlib.aclosing(manager.generate(GenerateRequest(text="hello", stream=True))) as outputs:
        async for _ in outputs:
            return time.perf_counter() - started
    pytest.fail("no output")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["echo", "ngram"])
def test_an_idle_deployment_costs_nothing_and_wakes_at_once(deployment_name: str, engine: str) -> None:
    """Processes that spin while idle take a core each from everybody else, day and night."""

    async def work() -> None:
        async with TokenizerManager(Settings(name=deployment_name, workers=2), engine=engine) as manager:
            assert await manager.wait_until_ready(60)
            before_s = [await first_piece_s(manager) for _ in range(20)]
            pids = {
                "manager": os.getpid(),
                "scheduler": shmring.read_statistics(f"{deployment_name}.ingress").consumer.pid,
                "worker 0": shmring.read_statistics(f"{deployment_name}.reply.0").producer.pid,
                "worker 1": shmring.read_statistics(f"{deployment_name}.reply.1").producer.pid,
            }
            used = {part: cpu_s(pid) for part, pid in pids.items()}
            await asyncio.sleep(IDLE_S)
            used = {part: cpu_s(pid) - used[part] for part, pid in pids.items()}
            print(used)
            assert max(used.values()) <= CPU_MAX_S, used
            # a request after a pause is served as one before it: waits of a check interval would show
            after_s = await first_piece_s(manager)
            assert after_s < max(*before_s, 0.05) + 0.2

    run(work())
