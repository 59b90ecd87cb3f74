"""A manager without a tokenizer: ids in, ids out, and every end that a request can have."""

from __future__ import annotations

from typing import Any

from manager_world import LENGTH, Client, World, run

from manager import BatchExtras, DisconnectedError, FinishReason, LogprobColumn, ValidationError


def test_ids_come_back_and_requests_end_as_elsewhere(ring_name: str) -> None:
    """Stop tokens are trimmed, aborts reach the scheduler, and text is nowhere."""

    async def work() -> None:
        async with World(ring_name, has_tokenizer=False, vocab_size=300) as world:
            rids = ("limit", "token", "kept", "string", "aborted", "failed")
            clients = {
                rid: Client(
                    world.manager,
                    input_ids=[1, 2],
                    rid=rid,
                    sampling_params={"stop_token_ids": [9], "no_stop_trim": rid == "kept"},
                )
                for rid in rids
            }
            await world.arrive(*rids)
            for rid in rids:
                world.push(rid, [5, 6])
            await world.settle()
            world.push("limit", [7], LENGTH(3))
            world.push("token", [7, 9], FinishReason.stop(9))
            world.push("kept", [7, 9], FinishReason.stop(9))
            # what an engine with a tokenizer of its own may say
            world.push("string", [7], FinishReason.stop("END"))
            world.manager.abort("aborted")
            world.port.push_error(world.requests["failed"], "no")
            found: dict[str, tuple[str, list[int], int]] = {}
            for rid, client in clients.items():
                await client.end()
                ids = [token for piece in client.pieces for token in piece.output_ids]
                found[rid] = client.text, ids, client.pieces[-1].completion_tokens
            await world.settle()
            assert found == {
                "limit": ("", [5, 6, 7], 3),
                "token": ("", [5, 6, 7], 4),
                "kept": ("", [5, 6, 7, 9], 4),
                "string": ("", [5, 6, 7], 3),
                "aborted": ("", [5, 6], 2),
                "failed": ("", [5, 6], 2),
            }
            assert isinstance(clients["aborted"].error, DisconnectedError)
            assert isinstance(clients["failed"].error, ValidationError)
            assert clients["string"].reason == {"type": "stop", "matched": "END"}
            assert world.aborts == [world.requests["aborted"]]
            assert world.is_empty()

    run(work())


def test_log_probabilities_come_without_texts(ring_name: str) -> None:
    """Numbers and ids need no tokenizer."""

    async def work() -> None:
        async with World(ring_name, has_tokenizer=False, vocab_size=300) as world:
            asked: dict[str, Any] = {"input_ids": [1, 2], "return_logprob": True}
            client = Client(world.manager, rid="a", **asked)
            await world.arrive("a")
            world.port.push_batch(
                [world.requests["a"]],
                [1],
                [5],
                [3],
                [1],
                extras=BatchExtras(output=LogprobColumn(values=[[-0.5]], ids=[[5]])),
            )
            (piece,) = (await client.end()).pieces
            assert piece.logprobs.output == [(-0.5, 5, None)]

    run(work())
