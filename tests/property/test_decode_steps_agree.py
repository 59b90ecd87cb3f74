"""The step in C and the step in Python, fed with the same frames, give the same frames.

The one in Python is short enough to be read and checked; the one in C is what runs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import shmring
from manager import messages
from manager.decode_step import OutputOptions, PlainStep
from manager.detokenize import TableDecoder, choose
from manager.errors import ManagerError
from manager.finish import FinishCode, FinishReason, encode
from manager.table_step import TableStep

DATA = Path(__file__).parents[1] / "data"
TOKENIZERS = [
    "detok/bytelevel_tiny",
    "detok/bytefallback_tiny",
    "tokenizers/metaspace",
    "tokenizers/wordpiece",
    None,
]
RUNS = 60
FRAMES = 40
SLOTS_MAX = 12


@cache
def _table(name: str) -> Any:
    tokenizer = Tokenizer.from_file(str(DATA / f"{name}.json"))
    table = choose(tokenizer).table
    assert table is not None
    return tokenizer, table


@dataclass
class World:
    """What is registered and pushed, by chance."""

    rng: random.Random
    vocab_size: int
    texts: list[str]

    def stops(self) -> tuple[str, ...]:
        rng = self.rng
        if rng.random() < 0.4:
            return ()
        out = []
        for _ in range(rng.randint(1, 4)):
            text = rng.choice(self.texts)
            start = rng.randrange(len(text))
            out.append(text[start : start + rng.randint(1, 6)])
        return tuple(out)

    def options(self) -> OutputOptions:
        rng = self.rng
        return OutputOptions(
            prompt_tail=np.array(self.ids(rng.choice([0, 0, 1, 3, 8])), np.int32),
            skip_special_tokens=rng.random() < 0.5,
            spaces_between_special_tokens=True,
            no_stop_trim=rng.random() < 0.5,
            min_new_tokens=rng.choice([0, 0, 0, 3, 9]),
            stops=self.stops(),
        )

    def ids(self, count: int) -> list[int]:
        rng = self.rng
        if rng.random() < 0.1:
            return [
                rng.choice([-1, 2**31 - 1, self.vocab_size + 3, rng.randrange(-5, 300)]) for _ in range(count)
            ]
        return [rng.randrange(self.vocab_size) if rng.random() < 0.3 else self.common() for _ in range(count)]

    def common(self) -> int:
        """Ids that stop strings are made of."""
        return self.rng.randrange(min(self.vocab_size, 40))

    def finish(self, token_ids: list[int]) -> FinishReason | None:
        rng = self.rng
        if rng.random() < 0.85:
            return None
        return rng.choice(
            [
                FinishReason.length(rng.randrange(99)),
                FinishReason.stop(),
                FinishReason.stop(token_ids[-1] if token_ids else 5),
                FinishReason.stop(rng.randrange(3)),
                FinishReason.stop([1, 2]),
                FinishReason.stop(rng.choice([*self.texts, "", "a", " "])[:3]),
                FinishReason.abort(),
                FinishReason.abort("why", status_code=500),
                FinishReason.from_mapping({"type": "odd", "n": rng.randrange(9)}),
            ]
        )

    def rows(self, open_ids: list[int]) -> list[tuple[int, list[int], FinishReason | None]]:
        rng = self.rng
        rows = []
        for request_id in [*rng.sample(open_ids, rng.randint(0, len(open_ids))), *rng.choices(open_ids, k=2)]:
            chosen = request_id if rng.random() < 0.95 else rng.randrange(1 << 60)
            token_ids = self.ids(rng.choice([0, 1, 1, 1, 2, 5, 20]))
            rows.append((chosen, token_ids, self.finish(token_ids)))
        return rows


def _push(producer: Any, rows: list[Any], flags: int) -> None:
    ends = [encode(reason) for _, _, reason in rows]
    has_details = any(end[2] for end in ends)
    has_values = has_details or any(end[0] for end in ends)
    assert messages.BATCH.push(
        producer,
        len(rows),
        np.array([request_id for request_id, _, _ in rows], np.uint64),
        np.array([len(ids) for _, ids, _ in rows], np.uint32),
        np.array([token_id for _, ids, _ in rows for token_id in ids], np.int32),
        np.array([end[0] for end in ends], np.uint8),
        np.array([end[1] for end in ends], np.int64) if has_values else None,
        *(messages.pack_bytes([end[2] for end in ends]) if has_details else (None, None)),
        flags=flags,
    )


def _columns(replies: list[Any]) -> list[Any]:
    return [
        (schema.name, rows, [None if column is None else column.tolist() for column in columns])
        for schema, rows, columns in replies
    ]


def _read(reply: Any) -> list[Any]:
    frames = []
    for record in reply.drain(100):
        frame = messages.TEXT.read(record)
        columns = [frame[name].tolist() if name in frame else None for name in messages.TEXT.names]
        frames.append(("text", frame.rows, columns))
    if frames:
        reply.release()
    return frames


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("way", ["ring", "buffer"])
def test_both_steps_answer_alike(ring_name: str, name: str | None, way: str) -> None:
    """What the tests of the readable one prove would not hold for the one that runs."""
    seed = random.randrange(1 << 32)
    print(f"seed={seed}")
    vocab_size, texts = 100, ["abc def"]
    table = None
    if name is not None:
        tokenizer, table = _table(name)
        vocab_size = table.vocab_size
        texts = [tokenizer.decode(list(range(start, start + 12))) + "ab" for start in range(0, 36, 4)]
    with (
        shmring.create(f"{ring_name}.batch", 1 << 16) as batches,
        shmring.create(f"{ring_name}.reply", 1 << 18) as replies,
        batches.producer() as producer,
        batches.consumer(poison=True) as consumer,
        replies.producer() as reply,
        replies.consumer(poison=True) as answers,
    ):
        for run in range(RUNS):
            world = World(random.Random(seed + run), vocab_size, texts)
            decoders = [
                None if table is None else TableDecoder(table, slots_max=SLOTS_MAX, reason="") for _ in "ab"
            ]
            plain, fast = PlainStep(decoders[0]), TableStep(decoders[1])
            options: dict[int, OutputOptions] = {}
            for _ in range(FRAMES):
                for _ in range(world.rng.randrange(4)):
                    request_id = world.rng.randrange(1 << 64)
                    options[request_id] = world.options()
                    for step in (plain, fast):
                        step.open(request_id, options[request_id])
                if not options:
                    continue
                rows = world.rows(list(options))
                _push(producer, rows, world.rng.choice([0, 1]))
                (record,) = consumer.drain(1)
                wanted = plain.take(record, None)
                found = fast.take(record, reply if way == "ring" else None)
                frames = _read(answers) if way == "ring" else _columns(found.replies)
                assert frames == _columns(wanted.replies), f"seed={seed}, run={run}"
                for fact in (
                    "rows",
                    "tokens",
                    "unknown",
                    "late_rows",
                    "refused",
                    "problem",
                    "stopped",
                    "ended",
                ):
                    assert getattr(found, fact) == getattr(wanted, fact), f"seed={seed}, run={run}, {fact}"
                consumer.release()
                for request_id in list(options):
                    assert (request_id in plain) == (request_id in fast)
                    if request_id not in plain or world.rng.random() < 0.03:
                        plain.close(request_id)
                        fast.close(request_id)
                        del options[request_id]
                assert len(plain) == len(fast) == len(options)


@pytest.mark.parametrize("code", range(256))
def test_both_steps_refuse_the_same_ends(ring_name: str, code: int) -> None:
    """A frame with an end that cannot be is rejected whole, and says why in the same words."""
    _, table = _table("detok/bytelevel_tiny")
    steps = [
        PlainStep(TableDecoder(table, slots_max=9, reason="")),
        TableStep(TableDecoder(table, slots_max=9, reason="")),
    ]
    options = World(random.Random(1), 100, ["abc"]).options()
    with (
        shmring.create(f"{ring_name}.batch", 1 << 16) as batches,
        batches.producer() as producer,
        batches.consumer() as consumer,
    ):
        for value in (0, 7):
            for details in (b"", b"\xc1", b"\x81\xa4type\xa3odd"):
                assert messages.BATCH.push(
                    producer,
                    1,
                    np.array([5], np.uint64),
                    np.array([1], np.uint32),
                    np.array([97], np.int32),
                    np.array([code], np.uint8),
                    np.array([value], np.int64),
                    *messages.pack_bytes([details]),
                )
                (record,) = consumer.drain(1)
                answers: list[Any] = []
                for step in steps:
                    step.open(5, options)
                    try:
                        answers.append(_columns(step.take(record, None).replies))
                    except ManagerError as error:
                        answers.append((type(error), str(error)))
                    step.close(5)
                assert answers[0] == answers[1]
                consumer.release()


def test_codes_are_those_of_the_finish_column() -> None:
    """C would take one end for another."""
    from manager._detok import lib

    for code in FinishCode:
        assert getattr(lib, f"DETOK_FINISH_{code.name}") == code
