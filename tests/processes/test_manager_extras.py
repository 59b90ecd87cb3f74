"""Log probabilities through a whole deployment: every part a process of its own."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from manager import GenerateOutput, GenerateRequest, Settings, TokenizerManager, ValidationError
from manager.tokenizer import EMBEDDED_TOKENIZER

if TYPE_CHECKING:
    from collections.abc import Coroutine

pytestmark = pytest.mark.timeout(120)

PROMPT = "The school stood on"


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


async def outputs_of(manager: TokenizerManager, **request: Any) -> list[GenerateOutput]:
    params = {"max_new_tokens": 7, "ignore_eos": True, "sampling_seed": 5}
    wanted = GenerateRequest(text=PROMPT, sampling_params=params, **request)
    return [output async for output in manager.generate(wanted)]


def test_log_probabilities_come_with_the_tokens_they_belong_to(ring_name: str) -> None:
    """Streamed or whole, beside neighbours that want none: the same numbers for the same tokens."""

    async def work() -> None:
        tokenizer = Tokenizer.from_file(str(EMBEDDED_TOKENIZER))
        prompt_ids = tokenizer.encode(PROMPT).ids
        async with TokenizerManager(Settings(name=ring_name, workers=2), engine="ngram") as manager:
            assert await manager.wait_until_ready(60)
            asked: dict[str, Any] = {
                "return_logprob": True,
                "return_text_in_logprobs": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 3,
                "token_ids_logprob": [5],
            }
            answers = await asyncio.gather(
                outputs_of(manager, **asked),
                outputs_of(manager, stream=True, **asked),
                outputs_of(manager, stream=True),
                outputs_of(manager, return_logprob=True),
                outputs_of(manager, stream=True, accumulated=True, **asked),
            )
        (whole,), streamed, plain, (bare,), accumulated = answers
        last = accumulated[-1]
        assert (last.text, last.output_ids, last.logprobs) == (whole.text, whole.output_ids, whole.logprobs)
        assert all(last.text.startswith(piece.text) for piece in accumulated)
        assert all(piece.logprobs is None for piece in plain)
        assert all(piece.hidden_states is None for piece in (whole, *streamed))
        logprobs = whole.logprobs
        assert logprobs is not None
        assert [token_id for _, token_id, _ in logprobs.output] == whole.output_ids
        assert all(value is not None and value <= 0 for value, _, _ in logprobs.output)
        assert logprobs.input[0][0] is None
        assert [token_id for _, token_id, _ in logprobs.input] == prompt_ids
        assert logprobs.input_top[0] is None
        for (value, _, text), top, named in zip(
            logprobs.output, logprobs.output_top, logprobs.output_token_ids, strict=True
        ):
            assert top is not None
            assert named is not None
            assert top[0][0] is not None
            assert value is not None
            assert value <= top[0][0]
            assert 1 <= len(top) <= 3
            assert sum(math.exp(each) for each, _, _ in top if each is not None) <= 1.0001
            assert [token_id for _, token_id, _ in named] == [5]
            assert text
        assert "".join(text or "" for _, _, text in logprobs.output) == whole.text
        pieces = [piece.logprobs for piece in streamed if piece.logprobs is not None]
        assert [entry for piece in pieces for entry in piece.output] == logprobs.output
        assert [entry for piece in pieces for entry in piece.input] == logprobs.input
        for piece in streamed:
            said = [] if piece.logprobs is None else piece.logprobs.output
            assert [token_id for _, token_id, _ in said] == piece.output_ids
        assert bare.logprobs is not None
        assert bare.logprobs.input == bare.logprobs.output_top == []
        assert [entry[:2] for entry in bare.logprobs.output] == [entry[:2] for entry in logprobs.output]
        assert {text for _, _, text in bare.logprobs.output} == {None}

    run(work())


def test_what_an_engine_has_not_is_refused_in_words(ring_name: str) -> None:
    """By the deployment if it is not set up for it, by the engine if that cannot."""

    async def work() -> None:
        settings = Settings(name=ring_name, hidden_states_enabled=True)
        async with TokenizerManager(settings, engine="echo") as manager:
            assert await manager.wait_until_ready(60)
            with pytest.raises(ValidationError, match="no log probabilities"):
                await outputs_of(manager, return_logprob=True)
            with pytest.raises(ValidationError, match="no hidden states"):
                await outputs_of(manager, return_hidden_states=True)
            assert (await outputs_of(manager))[0].text

    run(work())
