"""What SGLang's server promises about what a scheduler is told, row by row.

Where it has positions in an array, here are columns with names.
"""

from __future__ import annotations

from typing import Any

import pytest
from decoding import tiny_tokenizer, trained
from manager_world import LENGTH, Client, World, run

from manager import SamplingParams, messages
from manager.extras import OPTIONS_DTYPE

REQUEST: dict[str, Any] = {
    "rid": "r1",
    "text": "hi",
    "sampling_params": {"max_new_tokens": 5},
    "return_logprob": True,
    "logprob_start_len": -1,
    "top_logprobs_num": 3,
    "return_hidden_states": True,
    "stream": True,
}


def test_everything_that_was_asked_for_stands_in_its_own_column(ring_name: str) -> None:
    """Shifted by one, a temperature is a penalty."""

    async def work() -> None:
        async with World(ring_name, hidden_states_enabled=True) as world:
            client = Client(world.manager, **REQUEST, token_ids_logprob=[7, 8])
            arrivals = await world.next_arrivals()
            assert arrivals.rids == ["r1"]
            assert arrivals.prompt_ids.tolist() == tiny_tokenizer("bytelevel").encode("hi").ids
            assert arrivals.sampling["max_new_tokens"].tolist() == [5]
            assert dict(zip(OPTIONS_DTYPE.names or (), arrivals.options[0].item(), strict=True)) == {
                "logprob_start_len": -1,
                "top_logprobs_num": 3,
                "return_logprob": True,
                "return_hidden_states": True,
            }
            assert arrivals.token_ids_logprob.tolist() == [7, 8]
            world.push("r1", "x", LENGTH(1))
            await client.end()

    run(work())


def test_what_nobody_asked_for_has_its_default(ring_name: str) -> None:
    """The plain request is the one that must be right at any load."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text="hi", rid="r1")
            arrivals = await world.next_arrivals()
            sampling = dict(zip(arrivals.sampling.dtype.names, arrivals.sampling[0].item(), strict=True))
            assert sampling == {
                "temperature": 1.0,
                "top_p": 1.0,
                "min_p": 0.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "repetition_penalty": 1.0,
                "max_new_tokens": 128,
                "min_new_tokens": 0,
                "sampling_seed": 0,
                "top_k": 1 << 30,
                "stream_interval": 0,
                "stop_str_max_len": 0,
                "stop_regex_max_len": 0,
                "ignore_eos": False,
                "skip_special_tokens": True,
                "spaces_between_special_tokens": True,
                "no_stop_trim": False,
                "has_seed": False,
            }
            assert arrivals.options[0].item() == (-1, 0, False, False)
            assert arrivals.token_ids_logprob.tolist() == []
            assert arrivals.stop_token_ids.tolist() == []
            assert arrivals.extras == [b""]
            world.push("r1", "x", LENGTH(1))
            await client.end()

    run(work())


def test_an_abort_is_a_number_and_nothing_else(ring_name: str) -> None:
    """Aborts pass a ring that is full of everything else: they are as small as can be."""

    async def work() -> None:
        async with World(ring_name) as world:
            client = Client(world.manager, text="hi", rid="12345")
            await world.arrive("12345")
            world.manager.abort("12345")
            await client.end()
            await world.settle()
            assert world.aborts == [world.requests["12345"]]

    run(work())
    assert messages.ABORT.names == ("request_ids",)


@pytest.mark.parametrize("name", ["bytelevel", "bytefallback", "wordpiece", "metaspace"])
@pytest.mark.parametrize("stop", ["a bb ccc", "dd", "\n\n", "终わり", "\U00013000", "<|end|>", "😀"])
def test_the_window_for_stop_strings_is_never_below_their_tokens(name: str, stop: str) -> None:
    """It is given in bytes, of which each token that the stop lies in has at least one."""
    normalized = SamplingParams(stop=[stop, "d"]).normalize(vocab_size=1000, has_tokenizer=True)
    assert normalized.stop_str_max_len == len(stop.encode())
    encoding = trained(name).encode(f"x{stop}x", add_special_tokens=False)
    covering = [1 for start, end in encoding.offsets if end > 1 and start < 1 + len(stop)]
    assert len(covering) <= normalized.stop_str_max_len
