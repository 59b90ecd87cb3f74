"""Text through whole deployments: every kind of tokenizer, many requests, not one character amiss."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

import shmring
from manager import DisconnectedError, GenerateRequest, Settings, TokenizerManager, ValidationError
from manager.tokenizer import EMBEDDED_TOKENIZER

if TYPE_CHECKING:
    from collections.abc import Coroutine

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
SMALL = {
    kind: ROOT / "tests/data/tokenizers" / f"{kind}.json"
    for kind in ("bytelevel", "bytefallback", "metaspace", "wordpiece")
}
REAL = {
    kind: ROOT / ".cache/tokenizers" / f"{kind}.json"
    for kind in ("qwen3", "deepseek", "mistral_spm", "claude2", "minilm_wordpiece", "mon_unigram")
}

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 3.14, isn't it? (Yes!)",
    "  leading spaces,   runs   of    spaces, tabs\tand\n\nnew lines \n at the end \n",
    "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心。",  # noqa: RUF001
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, 1️⃣ key, 🇰🇷 nation, é composed, \u0301 alone",
    '#include <stdio.h>\nint main(void) {\n\tprintf("%d\\n", 0x1F ^ 3);\n\treturn 0;  /* ünïcode */\n}\n',
    "x",
    "ﷺ ꧅ 𓀀 \U0010fffd \ufeff zero\u200bwidth",
    "def f(x: int) -> dict:\n    return {'a': x ** 2, \"b\": [i for i in range(x)]}\n" * 5,
]  # fmt: skip


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


async def pieces_of(manager: TokenizerManager, **request: Any) -> tuple[list[str], list[int], Any]:
    """Text pieces, all ids and the finish reason of one request that streams."""
    texts: list[str] = []
    ids: list[int] = []
    reason = None
    async with contextlib.aclosing(manager.generate(GenerateRequest(stream=True, **request))) as outputs:
        async for output in outputs:
            assert reason is None, "a piece after the last one"
            texts.append(output.text)
            ids += output.output_ids
            reason = output.finish_reason
            matched = None if reason is None else reason.matched()
            trimmed = int(isinstance(matched, int) and matched != 0)  # id 0 is never trimmed
            assert output.completion_tokens == len(ids) + trimmed
    return texts, ids, reason


def check_through(tokenizer_file: Path, name: str, *, workers: int, engine: str = "echo") -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_padding()
    tokenizer.no_truncation()

    async def work() -> None:
        settings = Settings(name=name, tokenizer=tokenizer_file, workers=workers)
        async with TokenizerManager(settings, engine=engine) as manager:
            assert await manager.wait_until_ready(60)
            requests = [
                (text, skip)
                for text in TEXTS
                for skip in (True, False)
            ]  # fmt: skip
            results = await asyncio.gather(
                *(
                    pieces_of(
                        manager,
                        text=text,
                        sampling_params={"max_new_tokens": None, "skip_special_tokens": skip},
                    )
                    for text, skip in requests
                )
            )
            for (text, skip), (pieces, ids, reason) in zip(requests, results, strict=True):
                assert ids == tokenizer.encode(text).ids
                wanted = tokenizer.decode(ids, skip_special_tokens=skip)
                assert "".join(pieces).encode() == wanted.encode(), (text, skip)
                assert reason.kind_name() == "stop"

    run(work())


@pytest.mark.parametrize("kind", SMALL)
def test_streamed_text_is_what_the_tokenizer_decodes(deployment_name: str, kind: str) -> None:
    """Whoever reads the stream and whoever decodes the ids must see the same text."""
    check_through(SMALL[kind], deployment_name, workers=2)


@pytest.mark.parametrize("kind", REAL)
def test_streamed_text_is_what_a_real_tokenizer_decodes(deployment_name: str, kind: str) -> None:
    """The small ones are made for tests; these are what users have."""
    if not REAL[kind].is_file():
        pytest.skip(f"no such file: {REAL[kind]}")
    check_through(REAL[kind], deployment_name, workers=1)


def test_a_thousand_echoes_come_back_each_to_its_own(deployment_name: str) -> None:
    """A text that goes to another client is the fault nobody forgives."""

    async def work() -> None:
        async with TokenizerManager(Settings(name=deployment_name, workers=2), engine="echo") as manager:
            assert await manager.wait_until_ready(60)
            room = asyncio.Semaphore(64)

            async def ask(number: int) -> None:
                text = f"request {number} " + TEXTS[number % len(TEXTS)][: 1 + number % 97]
                stream = number % 3 != 0
                async with room:
                    texts = []
                    request = GenerateRequest(text=text, rid=f"rid-{number}", stream=stream)
                    async for output in manager.generate(request):
                        assert output.rid == f"rid-{number}"
                        texts.append(output.text)
                    assert stream or len(texts) == 1
                    assert "".join(texts) == text

            await asyncio.gather(*(ask(number) for number in range(1000)))
            assert_nothing_is_kept(manager)
            # no ring holds anything either
            for ring in ("ingress", "egress.0", "egress.1", "register.0", "register.1", "reply.0", "reply.1"):
                while shmring.read_statistics(f"{deployment_name}.{ring}").used_bytes:
                    await asyncio.sleep(0.01)

    run(work())


def assert_nothing_is_kept(manager: TokenizerManager) -> None:
    assert manager.in_flight_count == 0
    assert not manager._streams
    assert not manager._rids
    assert manager._outbox.kept_count == 0


def test_a_thousand_generated_texts_are_the_same_alone_and_in_a_crowd(deployment_name: str) -> None:
    """With a seed a request has one answer, whoever else is served at the time."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_TOKENIZER))

    async def work() -> None:
        async with TokenizerManager(Settings(name=deployment_name, workers=2), engine="ngram") as manager:
            assert await manager.wait_until_ready(60)
            room = asyncio.Semaphore(64)

            async def ask(number: int) -> tuple[str, list[int]]:
                async with room:
                    pieces, ids, reason = await pieces_of(
                        manager,
                        text="Once upon a time",
                        sampling_params={"sampling_seed": number % 25, "max_new_tokens": 24},
                    )
                assert reason is not None
                return "".join(pieces), ids

            alone = [await ask(number) for number in range(25)]
            crowd = await asyncio.gather(*(ask(number) for number in range(1000)))
            for number, result in enumerate(crowd):
                assert result == alone[number % 25]
            assert len({text for text, _ in alone}) > 20
            prompt = tokenizer.encode("Once upon a time").ids
            for text, ids in alone:
                whole = tokenizer.decode(prompt + ids)
                assert whole == tokenizer.decode(prompt) + text
            assert_nothing_is_kept(manager)

    run(work())


def test_a_batch_with_one_bad_item_serves_the_others(deployment_name: str) -> None:
    """One prompt of a batch that is too long for the engine must not cost the other answers."""

    async def work() -> None:
        async with TokenizerManager(Settings(name=deployment_name, workers=2), engine="echo") as manager:
            assert await manager.wait_until_ready(60)
            params = [{}, {"regex": "a+"}, {}]
            request = GenerateRequest(text=["one", "two", "three"], sampling_params=params)
            ends = {output.index: output async for output in manager.generate(request)}
            assert ends[0].text == "one"
            assert ends[2].text == "three"
            assert ends[1].error is not None
            assert ends[1].error.status == 400
            assert "regex" in str(ends[1].error)
            assert_nothing_is_kept(manager)

    run(work())


def test_ids_go_through_without_a_tokenizer(deployment_name: str) -> None:
    """A client that tokenizes for itself wants its ids, and no text."""

    async def work() -> None:
        settings = Settings(name=deployment_name, workers=2, has_tokenizer=False, vocab_size=100)
        async with TokenizerManager(settings, engine="echo") as manager:
            assert await manager.wait_until_ready(60)
            ids = list(range(100)) * 3
            pieces, found, _ = await pieces_of(
                manager, input_ids=ids, sampling_params={"max_new_tokens": None}
            )
            assert found == ids
            assert "".join(pieces) == ""
            _, found, reason = await pieces_of(
                manager, input_ids=ids, sampling_params={"stop_token_ids": [7]}
            )
            assert found == list(range(7))
            assert reason.matched() == 7

    run(work())


def test_requests_without_a_tokenizer_end_in_every_way(deployment_name: str) -> None:
    """By their limit, by an abort in the middle, by a reader that leaves; and what needs text is refused."""

    async def work() -> None:
        settings = Settings(name=deployment_name, workers=2, has_tokenizer=False, vocab_size=100)
        async with TokenizerManager(settings, engine="echo") as manager:
            assert await manager.wait_until_ready(60)
            endless = {"input_ids": list(range(100)) * 80, "sampling_params": {"max_new_tokens": None}}
            _, found, reason = await pieces_of(
                manager, input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 2}
            )
            assert (found, reason.to_mapping()) == ([1, 2], {"type": "length", "length": 2})
            aborted = asyncio.create_task(pieces_of(manager, rid="aborted", **endless))
            while not manager.abort("aborted"):
                await asyncio.sleep(0)
            with pytest.raises(DisconnectedError):
                await aborted
            async with contextlib.aclosing(
                manager.generate(GenerateRequest(stream=True, **endless))
            ) as outputs:
                assert (await anext(outputs)).output_ids[:1] == [0]
            assert await manager.probe()
            for field, request in {
                "stop": {"sampling_params": {"stop": ["."]}},
                "stop_regex": {"sampling_params": {"stop_regex": ["a"]}},
                "min_new_tokens": {"sampling_params": {"min_new_tokens": 1}},
                "return_text_in_logprobs": {"return_logprob": True, "return_text_in_logprobs": True},
            }.items():
                with pytest.raises(ValidationError, match="needs a tokenizer") as caught:
                    await pieces_of(manager, input_ids=[1], **request)
                assert caught.value.field == field
            with pytest.raises(ValidationError, match="no tokenizer") as caught:
                await pieces_of(manager, text="a")
            assert caught.value.field == "input_ids"
            assert manager.in_flight_count == 0
            assert_nothing_is_kept(manager)

    run(work())
