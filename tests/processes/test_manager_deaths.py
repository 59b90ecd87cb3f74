"""A deployment whose parts are killed: every request ends, and nothing is left.

The scheduler here takes requests and never answers, so all of them are held when the part dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import shmring
from manager import ConfigError, GenerateRequest, PartLostError, Settings, TokenizerManager, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

pytestmark = pytest.mark.timeout(120)

PROMISE_S = 2.0
"""Within so many seconds of a part's death every request that it held has ended."""
HELD = 100

SILENT_SCHEDULER = """
import sys
from manager import DeploymentEndedError, SchedulerPort
with SchedulerPort.attach(sys.argv[1], timeout_s=60) as port:
    try:
        while True:
            port.wait(1.0)
            for rid in port.drain().rids:
                print(rid, flush=True)
    except DeploymentEndedError as error:
        sys.exit(0 if error.orderly else 3)
"""


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 90))


async def collect(manager: TokenizerManager, **request: Any) -> str:
    """The text of a request, whatever comes of it."""
    text = ""
    async with contextlib.aclosing(manager.generate(GenerateRequest(**request))) as outputs:
        async for output in outputs:
            text += output.text
    return text


async def hold(manager: TokenizerManager, count: int, *, stream: bool = True) -> list[asyncio.Task[str]]:
    """Send requests that nobody answers; they are with the scheduler when this returns."""
    name = manager._settings.name
    before = shmring.read_statistics(f"{name}.ingress").consumer.records
    tasks = [
        asyncio.create_task(collect(manager, text=f"held {i}", rid=f"held-{i}", stream=stream))
        for i in range(count)
    ]
    while shmring.read_statistics(f"{name}.ingress").consumer.records < before + count:
        assert not any(task.done() for task in tasks)
        await asyncio.sleep(0.005)
    return tasks


async def end_by_promise(tasks: list[asyncio.Task[str]], since: float) -> list[BaseException | str]:
    """Wait for the tasks, no longer than the promise allows; how each ended."""
    _, running = await asyncio.wait(tasks, timeout=max(0.0, since + PROMISE_S - time.monotonic()))
    assert not running, f"requests that still hang: count={len(running)}"
    return await asyncio.gather(*tasks, return_exceptions=True)


def settings(name: str, **others: Any) -> Settings:
    return Settings(name=name, **{"workers": 2, **others})


def test_a_killed_scheduler_ends_every_request_in_time_and_the_next_one_serves(
    commands: Any, deployment_name: str
) -> None:
    """A dead engine behind a front end that answers 200 for ten minutes: the worst of all reports."""

    async def work() -> None:
        silent = commands.python("-c", SILENT_SCHEDULER, deployment_name)
        async with TokenizerManager(settings(deployment_name)) as manager:
            assert await manager.wait_until_ready(60)
            tasks = await hold(manager, HELD)
            killed = time.monotonic()
            silent.kill()
            for end in await end_by_promise(tasks, killed):
                assert isinstance(end, PartLostError)
                assert end.part == "scheduler"
                assert end.status == 503
            assert manager.in_flight_count == 0
            with pytest.raises(UnavailableError, match="scheduler"):
                await collect(manager, text="nobody is there")
            commands.manager("scheduler", "--name", deployment_name, "--engine", "echo")
            assert await manager.wait_until_ready(60)
            # the very same rids: they are free again
            texts = await asyncio.gather(
                *(collect(manager, text=f"again {i}", rid=f"held-{i}") for i in range(HELD))
            )
            assert texts == [f"again {i}" for i in range(HELD)]
            assert manager.in_flight_count == 0

    run(work())


def test_a_scheduler_that_is_replaced_between_two_looks_is_noticed(
    commands: Any, deployment_name: str
) -> None:
    """A supervisor restarts it faster than anybody looks; what the old one held must not hang."""

    async def work() -> None:
        silent = commands.python("-c", SILENT_SCHEDULER, deployment_name)
        manager = TokenizerManager(settings(deployment_name, check_interval_s=1.0))
        async with manager:
            assert await manager.wait_until_ready(60)
            tasks = await hold(manager, 10)
            successor = shmring_scheduler(commands, deployment_name)
            killed = time.monotonic()
            silent.kill()
            ends = await end_by_promise(tasks, killed + 60)
            assert all(isinstance(end, PartLostError) for end in ends)
            assert await manager.wait_until_ready(60)
            assert await collect(manager, text="hello") == "hello"
            assert successor.is_running

    run(work())


def shmring_scheduler(commands: Any, name: str) -> Any:
    """A scheduler that takes the place the moment it is free."""
    script = (
        "import sys, time, random\n"
        "from manager import SchedulerPort, DeploymentEndedError\n"
        "from manager.engines.catalogue import make_engine\n"
        "from manager.engines.loop import run_engine\n"
        "import shmring\n"
        "while True:\n"
        "    try:\n"
        "        port = SchedulerPort.attach(sys.argv[1], timeout_s=60, continues_prompt=False)\n"
        "        break\n"
        "    except shmring.RoleTakenError:\n"
        "        time.sleep(0.001)\n"
        "with port:\n"
        "    engine = make_engine('echo', port, randomness=random.Random(1))\n"
        "    try:\n"
        "        run_engine(engine, port, should_stop=lambda: False)\n"
        "    except DeploymentEndedError:\n"
        "        pass\n"
    )
    return commands.python("-c", script, name)


def test_a_killed_worker_ends_its_requests_in_time_and_no_others(commands: Any, deployment_name: str) -> None:
    """One shard's crash must not take the others' requests with it, nor hang its own."""

    async def work() -> None:
        commands.python("-c", SILENT_SCHEDULER, deployment_name)
        async with TokenizerManager(settings(deployment_name)) as manager:
            assert await manager.wait_until_ready(60)
            tasks = await hold(manager, HELD)
            by_shard = {
                shard: [
                    tasks[int(stream.request.rid.split("-")[1])]
                    for stream in manager._streams.values()
                    if stream.shard == shard
                ]
                for shard in (0, 1)
            }
            killed = time.monotonic()
            os.kill(shmring.read_statistics(f"{deployment_name}.reply.0").producer.pid, signal.SIGKILL)
            for end in await end_by_promise(by_shard[0], killed):
                assert isinstance(end, PartLostError)
                assert end.part == "worker 0"
            assert not any(task.done() for task in by_shard[1])
            assert manager.in_flight_count == len(by_shard[1])
            # it is started again
            assert await manager.wait_until_ready(60)
            for task in by_shard[1]:
                task.cancel()
            await asyncio.gather(*by_shard[1], return_exceptions=True)
            assert manager.in_flight_count == 0

    run(work())


def test_a_worker_that_was_killed_serves_again(commands: Any, deployment_name: str) -> None:
    """The shard of a worker that crashed once must not stay dark, nor say what others said."""

    async def work() -> None:
        async with TokenizerManager(settings(deployment_name), engine="echo") as manager:
            assert await manager.wait_until_ready(60)
            for round_ in range(3):
                texts = [f"round {round_} number {i} of 20" for i in range(20)]
                assert await asyncio.gather(*(collect(manager, text=text) for text in texts)) == texts
                attaches = shmring.read_statistics(f"{deployment_name}.reply.1").producer.attaches
                os.kill(shmring.read_statistics(f"{deployment_name}.reply.1").producer.pid, signal.SIGKILL)
                while shmring.read_statistics(f"{deployment_name}.reply.1").producer.attaches == attaches:
                    await asyncio.sleep(0.01)
                while manager._parts.attaches("worker 1") == attaches or manager.missing_parts():
                    await asyncio.sleep(0.01)

    run(work())


def test_kills_in_the_middle_of_work_end_every_request(commands: Any, deployment_name: str) -> None:
    """Whatever dies at whatever moment: each request has its whole text or one error, never half of both."""

    async def work() -> None:
        config = settings(deployment_name, restarts_max=100, check_interval_s=0.05)
        text = "one two three four five six seven eight nine ten " * 4
        async with TokenizerManager(config, engine="echo") as manager:
            assert await manager.wait_until_ready(60)
            served = 0
            for ring, end in (("reply.0", "producer"), ("ingress", "consumer"), ("reply.1", "producer")) * 2:
                tasks = [asyncio.create_task(collect(manager, text=text, stream=True)) for _ in range(40)]
                await asyncio.sleep(0.004)
                statistics = shmring.read_statistics(f"{deployment_name}.{ring}")
                os.kill(getattr(statistics, end).pid, signal.SIGKILL)
                for result in await asyncio.gather(*tasks, return_exceptions=True):
                    assert result == text or isinstance(result, UnavailableError), result
                    served += result == text
                await asyncio.sleep(0.1)
                assert await manager.wait_until_ready(60)
            assert manager.in_flight_count == 0
            # and all is well again
            while True:
                with contextlib.suppress(UnavailableError):
                    assert await collect(manager, text=text) == text
                    break

    run(work())


@pytest.mark.parametrize("who", ["all of ours", "others'"])
def test_a_killed_manager_leaves_nothing(
    commands: Any,
    deployment_name: str,
    who: str,
    until: Callable[..., None],
    pids_of: Callable[[str], list[int]],
    names_left: Callable[[str], list[str]],
) -> None:
    """After a kill by the kernel nobody is there to clean up but those who see it."""
    options = ["--ignore-eos", "--max-new-tokens", "8000", "--workers", "2", "Once", "upon", "a time"]
    parts = []
    if who == "others'":
        options += ["--engine", "none", "--external-workers"]
        parts = [
            commands.manager("scheduler", "--name", deployment_name, "--engine", "ngram"),
            commands.manager("worker", "--name", deployment_name, "--shard", "0"),
            commands.manager("worker", "--name", deployment_name, "--shard", "1"),
        ]
    manager = commands.manager("generate", "--name", deployment_name, *options)
    until(lambda: manager.out, "text")
    assert len(names_left(deployment_name)) == 9  # seven rings, the decode table and the manifest
    manager.kill()
    until(lambda: not pids_of(deployment_name), "the end of all parts", 10)
    until(lambda: not names_left(deployment_name), "the removal of all names", 10)
    for part in parts:
        assert part.wait() == 1
        assert "the manager has died" in part.err
        assert "Traceback" not in part.err


def test_a_manager_takes_over_the_name_of_a_killed_one(
    commands: Any, deployment_name: str, until: Callable[..., None]
) -> None:
    """A restart under the same name is what every supervisor does next."""
    options = ("--engine", "none", "--external-workers", "never answered")
    manager = commands.manager("generate", "--name", deployment_name, *options)
    until(lambda: "waiting" in manager.err, "the deployment")
    manager.kill()  # nobody is attached, so nobody removes its names
    scheduler = commands.manager(
        "scheduler", "--name", deployment_name, "--engine", "echo", "--timeout", "20"
    )
    worker = commands.manager("worker", "--name", deployment_name, "--shard", "0", "--timeout", "20")
    until(lambda: "waiting" in scheduler.err and "waiting" in worker.err, "the parts")
    # a dead deployment's name is none to attach to, however long it lies there
    time.sleep(1.5)
    assert scheduler.is_running
    assert worker.is_running
    successor = commands.manager(
        "generate", "--name", deployment_name, "--engine", "none", "--external-workers", "hello"
    )
    assert successor.wait() == 0
    assert successor.out == "hello\n"
    assert scheduler.wait() == 0
    assert worker.wait() == 0


def test_stopping_with_requests_pending_ends_each_of_them(commands: Any, deployment_name: str) -> None:
    """A request that hears nothing at shutdown waits for its own time-out, if it has one."""

    async def work() -> None:
        silent = commands.python("-c", SILENT_SCHEDULER, deployment_name)
        manager = TokenizerManager(settings(deployment_name))
        await manager.start()
        try:
            assert await manager.wait_until_ready(60)
            tasks = await hold(manager, HELD)
        finally:
            await manager.close()
        await manager.close()
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert {type(end).__name__ for end in ends} == {"DisconnectedError"}
        with pytest.raises(UnavailableError):
            await collect(manager, text="too late")
        assert silent.wait() == 0

    run(work())


def test_a_part_that_cannot_start_is_told_at_once(
    deployment_name: str, pids_of: Callable[[str], list[int]]
) -> None:
    """A part that dies at birth must not be waited for until the time is over."""

    async def work() -> None:
        # an engine with a vocabulary of its own
        tokenizer = Path(__file__).parents[1] / "data" / "tokenizers" / "bytelevel.json"
        manager = TokenizerManager(
            settings(deployment_name, restarts_max=2, tokenizer=tokenizer), engine="ngram"
        )
        await manager.start()
        try:
            with pytest.raises(ConfigError, match="scheduler cannot start: exit_code=1") as caught:
                await manager.wait_until_ready(60)
            assert caught.value.setting == "scheduler"
        finally:
            await manager.close()
        assert pids_of(deployment_name) == []

    run(work())
