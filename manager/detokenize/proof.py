"""Holds a decoder against the library's own decode, before it is trusted.

Every id of the vocabulary is decoded once, and so are some hundred sequences: random ids, ids
that start a text, many special tokens, and text of characters that are put together from
single bytes. Special tokens are skipped and shown. Not among them are broken runs of byte
tokens; those differ on purpose (see interface).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from manager._detok import lib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

    from manager.detokenize.interface import BatchDecoder
    from manager.detokenize.table import DecodeTable

_SEED = 20_011  # the same sequences at every load: a tokenizer that fits once fits always
_SEQUENCES = 120  # of each kind
_LENGTH_MAX = 24
_SWEEP_LENGTH = 512
_SWEEP_SKIPPING = 16

# Characters of 2, 3 and 4 bytes, at the ends of their ranges too, and the word mark of
# SentencePiece, which some decoders replace after putting it together.
_WIDE_TEXT = "é ߿ ࠀ 한국어 中文 ▁ ￼ \ufffd \U00010000 😀👩‍💻 \U0010ffff مرحبا "


def sequences_needed(vocab_size: int) -> int:
    """How many slots `difference` opens at a time."""
    return 5 * _SEQUENCES + vocab_size // _SWEEP_LENGTH + 2


def difference(decoder: BatchDecoder, table: DecodeTable, tokenizer: Tokenizer) -> str | None:
    """The first sequence of ids on which the two disagree, in words; None if they agree."""
    for skip_special in (True, False):
        sequences = list(_sequences(table, skip_special=skip_special))
        texts = _texts(decoder, sequences, skip_special=skip_special)
        for token_ids, text in zip(sequences, texts, strict=True):
            wanted = tokenizer.decode(token_ids, skip_special_tokens=skip_special)
            if text != wanted:
                at = next(
                    (i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b),
                    min(len(text), len(wanted)),
                )
                return f"found={text[at : at + 8]!r}, wanted={wanted[at : at + 8]!r}, at={at}"
    return None


def _texts(decoder: BatchDecoder, sequences: list[list[int]], *, skip_special: bool) -> list[str]:
    start_of_text = np.empty(0, np.int32)
    slots = [decoder.open(start_of_text, skip_special_tokens=skip_special) for _ in sequences]
    all_text, lengths = decoder.decode(
        np.array(slots, np.uint32),
        np.array([len(token_ids) for token_ids in sequences], np.uint32),
        np.array([token_id for token_ids in sequences for token_id in token_ids], np.int32),
    )
    texts: list[str] = []
    start = 0
    for slot, length in zip(slots, lengths.tolist(), strict=True):
        text = all_text[start : start + length].tobytes() + decoder.finish(slot)
        texts.append(text.decode())
        start += length
        decoder.close(slot)
    return texts


def _sequences(table: DecodeTable, *, skip_special: bool) -> Iterator[list[int]]:
    rng = random.Random(_SEED)  # noqa: S311 - to choose examples
    flags = table.flags
    broken = flags & (lib.DETOK_ID_KNOWN | lib.DETOK_ID_WHOLE) == lib.DETOK_ID_KNOWN
    special = np.flatnonzero(flags & lib.DETOK_ID_SPECIAL).tolist()
    # A hole or an id of parts of characters may stand anywhere, but not among byte tokens.
    ids = np.flatnonzero(~broken if table.bytes_in_runs else np.ones_like(broken)).tolist()
    if not ids:
        return

    past_end = table.vocab_size + 3  # the library leaves it out
    # skipping leaves special tokens out and changes no other's text, so one sweep over all is enough
    swept = sorted({*ids[::_SWEEP_SKIPPING], *special}) if skip_special else ids
    for start in range(0, len(swept), _SWEEP_LENGTH):
        yield swept[start : start + _SWEEP_LENGTH]
    for _ in range(_SEQUENCES):
        yield [rng.choice(ids)]
        yield rng.choices(ids, k=rng.randint(2, _LENGTH_MAX))
        mixed = [*rng.choices(ids, k=8), *special, past_end]
        yield rng.choices(mixed, k=rng.randint(1, _LENGTH_MAX))

    by_byte = _byte_ids(table)
    if by_byte is None:
        return
    for _ in range(_SEQUENCES):
        sequence: list[int] = []
        for character in rng.choices(_WIDE_TEXT, k=rng.randint(1, _LENGTH_MAX)):
            for byte in character.encode():
                sequence.append(by_byte[byte])
                if skip_special and special and rng.random() < 0.1:  # left out, so it parts nothing
                    sequence.append(rng.choice(special))
            if rng.random() < 0.2:
                sequence.append(rng.choice(ids))
        yield sequence
    if not table.bytes_in_runs:
        broken_ids = np.flatnonzero(broken).tolist() or ids
        for _ in range(_SEQUENCES):
            yield rng.choices(broken_ids, k=rng.randint(1, _LENGTH_MAX))


def _byte_ids(table: DecodeTable) -> list[int] | None:
    """An id for each byte, 0 to 255; None if there is not one for each that UTF-8 uses."""
    found = dict.fromkeys(range(256), -1)
    one_byte = np.flatnonzero(np.diff(table.text_offsets) == 1)
    for token_id in one_byte.tolist():
        found[table.text_of(token_id)[0]] = token_id
    # these bytes are in no valid text
    needed = {byte for character in _WIDE_TEXT for byte in character.encode()}
    if any(found[byte] < 0 for byte in needed):
        return None
    return [found[byte] for byte in range(256)]
