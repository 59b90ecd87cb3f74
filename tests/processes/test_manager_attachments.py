"""What a request carries for its engine, through real processes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from manager import GenerateRequest, Settings, TokenizerManager, ValidationError

if TYPE_CHECKING:
    from collections.abc import Coroutine

pytestmark = pytest.mark.timeout(120)

#: Answers each request with what it brought, as an error: that is a text of the scheduler's own.
TELLING_SCHEDULER = """
import hashlib, json, sys
from manager import DeploymentEndedError, SchedulerPort, decode_attachments
with SchedulerPort.attach(sys.argv[1], timeout_s=60) as port:
    try:
        while True:
            port.wait(1.0)
            arrivals = port.drain()
            for request_id, data in zip(arrivals.request_ids.tolist(), arrivals.attachments):
                told = decode_attachments(data)
                if "image" in told:
                    told["image"] = hashlib.sha256(told["image"]).hexdigest()
                port.push_error(request_id, json.dumps(told))
    except DeploymentEndedError as error:
        sys.exit(0 if error.orderly else 3)
"""


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


async def refusal(manager: TokenizerManager, **request: Any) -> str:
    """What a client is told whose request is refused."""
    try:
        async for _ in manager.generate(GenerateRequest(**request)):
            pytest.fail("output of a request that is refused")
    except ValidationError as error:
        return str(error)
    pytest.fail("it was not refused")


def test_attachments_reach_another_process_untouched(commands: Any, deployment_name: str) -> None:
    """Sizes of images and of nothing, many at once, each at its own request."""
    rng = random.Random(7)
    given = [
        {},
        {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 2**63 - 1},
        *({"image": rng.randbytes(rng.randrange(1 << 20)), "number": number} for number in range(30)),
    ]

    async def work() -> None:
        commands.python("-c", TELLING_SCHEDULER, deployment_name)
        async with TokenizerManager(Settings(name=deployment_name, workers=2)) as manager:
            assert await manager.wait_until_ready(60)
            room = asyncio.Semaphore(4)

            async def ask(attachments: dict[str, Any]) -> Any:
                async with room:
                    return json.loads(await refusal(manager, text="a prompt", attachments=attachments))

            answers = await asyncio.gather(*map(ask, given))
            assert await refusal(manager, input_ids=[1]) == "{}"
            too_long = await refusal(manager, text="x", attachments={"image": bytes(3 << 20)})
            assert too_long.startswith("attachments are too long: length=")
        for attachments, answer in zip(given, answers, strict=True):
            if "image" in attachments:
                attachments["image"] = hashlib.sha256(attachments["image"]).hexdigest()
            assert answer == attachments

    run(work())


def test_an_engine_of_the_package_refuses_them(deployment_name: str) -> None:
    """It knows of none, and says so."""

    async def work() -> None:
        async with TokenizerManager(Settings(name=deployment_name), engine="echo") as manager:
            assert await manager.wait_until_ready(60)
            assert "no attachments" in await refusal(manager, text="x", attachments={"a": 1})

    run(work())
