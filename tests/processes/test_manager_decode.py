"""Ids become text in worker processes, with and without a scheduler."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

import shmring
from manager import GenerateRequest, PartLostError, Settings, TokenizerManager, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Coroutine

pytestmark = pytest.mark.timeout(120)

FOLDER = Path(__file__).parents[1] / "data/tokenizers"
TEXT = "Grüße, 世界! It's 3.14; 👩‍💻 — ça va?\n"


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


async def wait_for_workers(manager: TokenizerManager) -> None:
    while manager.missing_parts() != ["scheduler"]:
        assert not await manager.wait_until_ready(0.02)


@pytest.mark.parametrize("kind", ["bytelevel", "wordpiece"])
def test_ids_become_the_text_that_the_library_makes_of_them(deployment_name: str, kind: str) -> None:
    """Of whatever kind the tokenizer is, and with nobody there who could generate."""

    async def work() -> None:
        file = FOLDER / f"{kind}.json"
        tokenizer = Tokenizer.from_file(str(file))
        async with TokenizerManager(Settings(name=deployment_name, tokenizer=file, workers=2)) as manager:
            await wait_for_workers(manager)
            ids = await manager.tokenize(TEXT)
            assert ids == tokenizer.encode(TEXT).ids
            texts = await asyncio.gather(*(manager.detokenize(ids[:end]) for end in range(len(ids))))
            assert texts == [tokenizer.decode(ids[:end]) for end in range(len(ids))]
            assert await manager.detokenize(ids * 500) == tokenizer.decode(ids * 500)

    run(work())


def test_texts_are_decoded_beside_running_requests(deployment_name: str) -> None:
    """Neither takes the other's text, and nothing of it reaches the scheduler."""

    async def work() -> None:
        settings = Settings(name=deployment_name, tokenizer=FOLDER / "bytelevel.json", workers=2)
        async with TokenizerManager(settings, engine="echo") as manager:
            assert await manager.wait_until_ready(60)
            ids = await manager.tokenize(TEXT)
            before = shmring.read_statistics(f"{deployment_name}.ingress").producer.records

            async def generate(number: int) -> str:
                params = {"max_new_tokens": None}
                request = GenerateRequest(text=f"{number} {TEXT}" * 3, sampling_params=params, stream=True)
                return "".join([output.text async for output in manager.generate(request)])

            count = 50
            answers = await asyncio.gather(
                *(generate(number) for number in range(count)),
                *(manager.detokenize(ids) for _ in range(count)),
            )
            assert answers == [f"{number} {TEXT}" * 3 for number in range(count)] + [TEXT] * count
            assert shmring.read_statistics(f"{deployment_name}.ingress").producer.records == before + count

    run(work())


def test_a_killed_worker_ends_what_it_was_asked_and_its_successor_answers(
    commands: Any, deployment_name: str, pids_of: Any
) -> None:
    """Not after the whole time that an answer may take, and not with another question's answer."""

    async def work() -> None:
        settings = Settings(name=deployment_name, workers=1, restarts_max=0)
        async with TokenizerManager(settings) as manager:
            await wait_for_workers(manager)
            (worker,) = pids_of(deployment_name)
            os.kill(worker, signal.SIGSTOP)
            ids = await manager.tokenize("lost")
            asked = [asyncio.create_task(manager.detokenize(ids, timeout_s=None)) for _ in range(10)]
            await asyncio.sleep(0.05)
            os.kill(worker, signal.SIGKILL)
            done, waiting = await asyncio.wait(asked, timeout=30)
            assert not waiting
            assert all(isinstance(task.exception(), PartLostError) for task in done)
            with pytest.raises(UnavailableError, match="worker 0"):
                await manager.detokenize(ids)
            commands.manager("worker", "--name", deployment_name, "--shard", "0")
            await wait_for_workers(manager)
            assert await manager.detokenize(await manager.tokenize("again")) == "again"

    run(work())
