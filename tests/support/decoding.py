"""Decoding as tests look at it: rows of a batch, and the deltas of one text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from manager.detokenize import BatchDecoder

DATA = Path(__file__).parents[1] / "data"
BROKEN = "\N{REPLACEMENT CHARACTER}"


def tiny_tokenizer(name: str) -> Tokenizer:
    """One of the two that are written by hand: every byte is an id."""
    return Tokenizer.from_file(str(DATA / "detok" / f"{name}_tiny.json"))


def trained(name: str) -> Tokenizer:
    """A small tokenizer of a common kind."""
    return Tokenizer.from_file(str(DATA / "tokenizers" / f"{name}.json"))


def ids_of(token_ids: Sequence[int]) -> NDArray[np.int32]:
    """As a column."""
    return np.array(token_ids, np.int32)


def decode_rows(decoder: BatchDecoder, rows: Sequence[tuple[int, Sequence[int]]]) -> list[str]:
    """Rows of (slot, ids) in one call; the text of each."""
    text, lengths = decoder.decode(
        np.array([slot for slot, _ in rows], np.uint32),
        np.array([len(token_ids) for _, token_ids in rows], np.uint32),
        ids_of([token_id for _, token_ids in rows for token_id in token_ids]),
    )
    assert text.dtype == np.uint8
    assert lengths.dtype == np.uint32
    assert int(lengths.sum()) == len(text)
    ends = np.cumsum(lengths).tolist()
    return [
        text[start:end].tobytes().decode() for start, end in zip([0, *ends][: len(ends)], ends, strict=True)
    ]


def stream(
    decoder: BatchDecoder, chunks: Iterable[Sequence[int]], *, prompt: Sequence[int] = (), skip: bool = True
) -> list[str]:
    """Deltas of the chunks, and last what was held at the end."""
    slot = decoder.open(ids_of(prompt), skip_special_tokens=skip)
    deltas = [decode_rows(decoder, [(slot, chunk)])[0] for chunk in chunks]
    deltas.append(decoder.finish(slot).decode())
    decoder.close(slot)
    return deltas


def one_by_one(decoder: BatchDecoder, token_ids: Sequence[int], **options: Any) -> list[str]:
    """As stream, an id a chunk."""
    return stream(decoder, [[token_id] for token_id in token_ids], **options)
