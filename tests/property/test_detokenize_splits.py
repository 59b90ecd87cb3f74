"""Ids split into chunks anywhere, among other texts, against models of the whole text.

The models: Python's own decoding of the joined bytes, and the library's decode of all ids.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from manager.detokenize import DecoderKind, load_decoder

DATA = Path(__file__).parents[1] / "data"
TRAINED = ("bytelevel", "bytefallback", "wordpiece", "metaspace")
START = np.empty(0, np.int32)

# Bytes that begin, continue and break characters, at the ends of their ranges.
RAW = st.lists(
    st.sampled_from(
        [*b"a \n\x7f", 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE4, 0xED]
    )
    | st.sampled_from([0xEF, 0xF0, 0xF1, 0xF4, 0xF5, 0xFF, 0x41, 0xB8, 0xAD]),
    max_size=24,
)


@lru_cache
def _tokenizer(name):
    if name.endswith("_tiny"):
        return Tokenizer.from_file(str(DATA / "detok" / f"{name}.json"))
    return Tokenizer.from_file(str(DATA / "tokenizers" / f"{name}.json"))


@lru_cache
def _decoder(name, kind):
    return load_decoder(_tokenizer(name), kind=kind)


def _cut(token_ids, cuts):
    """The ids in pieces that begin at the cuts."""
    places = sorted({min(cut, len(token_ids)) for cut in cuts} | {0, len(token_ids)})
    return [token_ids[start:end] for start, end in itertools.pairwise(places)]


def _text(decoder, chunks, *, skip=True, prompt=()):
    """The joined text; every delta is checked to be whole characters."""
    slot = decoder.open(np.array(prompt, np.int32), skip_special_tokens=skip)
    text = ""
    for chunk in chunks:
        delta, _ = decoder.decode(
            np.array([slot], np.uint32), np.array([len(chunk)], np.uint32), np.array(chunk, np.int32)
        )
        text += delta.tobytes().decode()
    text += decoder.finish(slot).decode()
    decoder.close(slot)
    return text


@settings(deadline=None)
@given(RAW, st.lists(st.integers(0, 24), max_size=8))
def test_any_bytes_decode_as_python_decodes_them(raw, cuts):
    """Broken output would differ between streaming and not, or be an invalid string."""
    decoder = _decoder("bytelevel_tiny", DecoderKind.TABLE)
    assert _text(decoder, _cut(raw, cuts)) == bytes(raw).decode("utf-8", "replace")


@settings(deadline=None)
@given(RAW, st.lists(st.integers(0, 24), max_size=8))
def test_any_byte_tokens_decode_as_python_decodes_their_bytes(raw, cuts):
    """A broken byte would take good characters along."""
    decoder = _decoder("bytefallback_tiny", DecoderKind.TABLE)
    wanted = bytes(raw).decode("utf-8", "replace").removeprefix(" ")
    assert _text(decoder, _cut([3 + byte for byte in raw], cuts)) == wanted


@settings(deadline=None)
@given(RAW, RAW, st.lists(st.integers(0, 24), max_size=8))
@example([0xED], [0xA0], [])
@example([0xED, 0xA0], [0x80], [])
@example([0x61, 0xEF], [0x80], [])
@example([0xF0, 0x9F], [0x98, 0x80], [1])
def test_what_the_prompt_began_is_completed_and_nothing_else_of_it_comes_out(prompt, raw, cuts):
    """The prompt would be streamed as if it were the answer."""
    decoder = _decoder("bytelevel_tiny", DecoderKind.TABLE)
    pending = _incomplete_end(bytes(prompt))
    if not (raw and _begins_well(pending + bytes(raw[:1]))):
        pending = b""  # nothing completes it: broken or not, it is the prompt's own
    wanted = (pending + bytes(raw)).decode("utf-8", "replace")
    assert _text(decoder, _cut(raw, cuts), prompt=prompt) == wanted


@lru_cache(maxsize=1 << 16)
def _begins_well(raw):
    """Whether these are text, or more bytes could make text of them.

    Python's incremental decoder does not say: it waits behind ED A0, which nothing completes.
    """
    seconds = (0x80, 0x90, 0xA0, 0xBF)  # one in each range that a second byte may have
    return any(
        _is_text(raw + bytes(rest)) for count in range(4) for rest in itertools.product(seconds, repeat=count)
    )


def _is_text(raw):
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _incomplete_end(raw):
    """The end that is the beginning of a character and not the whole of it."""
    for start in range(max(len(raw) - 3, 0), len(raw)):
        end = raw[start:]
        if _begins_well(end) and not any(_is_text(end[: n + 1]) for n in range(len(end))):
            return end
    return b""


@pytest.mark.parametrize("kind", list(DecoderKind), ids=lambda kind: kind.value)
@pytest.mark.parametrize("name", TRAINED)
@settings(deadline=None)
@given(data=st.data())
def test_chunks_make_the_text_that_the_library_decodes(name, kind, data):
    """What is streamed would not be what the same ids say at once."""
    tokenizer, decoder = _tokenizer(name), _decoder(name, kind)
    token_ids = data.draw(_sequences(tokenizer, decoder))
    skip = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=10))
    wanted = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert _text(decoder, _cut(token_ids, cuts), skip=skip) == wanted


def _sequences(tokenizer, decoder):
    """Ids of text, and any ids; byte tokens only where text has them."""
    texts = st.text("aeht .,'n\n中文한é😀👩\u200d▁", max_size=20)
    of_text = texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    anything = st.integers(0, decoder.vocab_size + 3).filter(
        lambda token_id: not (tokenizer.id_to_token(token_id) or "").startswith("<0x")
    )
    return st.lists(of_text | st.lists(anything, max_size=6), max_size=4).map(
        lambda parts: [token_id for part in parts for token_id in part]
    )


@pytest.mark.parametrize("kind", list(DecoderKind), ids=lambda kind: kind.value)
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 277), max_size=5)), max_size=12))
def test_texts_in_one_batch_do_not_touch_each_other(kind, rows):
    """Half a character of one answer would end up in another."""
    decoder = _decoder("bytelevel_tiny", kind)
    alone = [
        _text(decoder, [chunk for slot, chunk in rows if slot == wanted], skip=False) for wanted in range(4)
    ]
    slots = [decoder.open(START, skip_special_tokens=False) for _ in range(4)]
    text, lengths = decoder.decode(
        np.array([slots[slot] for slot, _ in rows], np.uint32),
        np.array([len(chunk) for _, chunk in rows], np.uint32),
        np.array([token_id for _, chunk in rows for token_id in chunk], np.int32),
    )
    together, start = [""] * 4, 0
    for (slot, _), length in zip(rows, lengths.tolist(), strict=True):
        together[slot] += text[start : start + length].tobytes().decode()
        start += length
    for index, slot in enumerate(slots):
        together[index] += decoder.finish(slot).decode()
        decoder.close(slot)
    assert together == alone
