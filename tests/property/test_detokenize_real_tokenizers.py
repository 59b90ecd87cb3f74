"""Tokenizers of real models: every text must be the library's, at any split.

They are looked for in `.cache/tokenizers/` and are too large to be kept beside the tests.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from manager._detok import lib
from manager.detokenize import DecoderKind, DecodeTable, TableDecoder, Vocabulary, load_decoder

REAL_TOKENIZERS = Path(__file__).parents[2] / ".cache" / "tokenizers"
NAMES = [
    *("claude2", "deepseek", "deepseek_v3", "gptoss", "llama3", "qwen3"),  # byte-level BPE
    *("gemini", "gemma3", "llama2", "mistral_spm"),  # SentencePiece, byte tokens
    "minilm_wordpiece",
    "mon_unigram",
]
SEQUENCES = 500
SEQUENCES_SLOW = 5000
START = np.empty(0, np.int32)
CHARACTERS = "etaoin shrdlu  .,!?'()\n中文字한국어あリغدéüñß▁🌶️👩‍💻𐀀"


@lru_cache
def _load(name):
    path = REAL_TOKENIZERS / f"{name}.json"
    if not path.exists():
        pytest.skip(f"the tokenizer was not fetched: {path}")
    tokenizer = Tokenizer.from_file(str(path))
    return tokenizer, DecodeTable.build(tokenizer, Vocabulary.of(tokenizer))


def _streamed(decoder, token_ids, rng, *, skip):
    """One id a chunk, all in one, or chunks of any length."""
    slot = decoder.open(START, skip_special_tokens=skip)
    longest = rng.choice([1, 6, len(token_ids) + 1])
    text, start = b"", 0
    while start < len(token_ids):
        chunk = np.array(token_ids[start : start + rng.randint(1, longest)], np.int32)
        delta, _ = decoder.decode(np.array([slot], np.uint32), np.array([len(chunk)], np.uint32), chunk)
        delta.tobytes().decode()
        text += delta.tobytes()
        start += len(chunk)
    text += decoder.finish(slot)
    decoder.close(slot)
    return text.decode()


def _sequence(tokenizer, table, rng):
    """Ids of one of five kinds; broken runs of byte tokens are left out."""
    whole = np.flatnonzero(table.flags & lib.DETOK_ID_WHOLE)
    special = np.flatnonzero(table.flags & lib.DETOK_ID_SPECIAL).tolist() or [0]
    usable = whole if table.bytes_in_runs else np.arange(table.vocab_size)
    parts = np.flatnonzero(~table.flags & lib.DETOK_ID_WHOLE)
    length = rng.randint(1, 40)
    some = [int(usable[rng.randrange(len(usable))]) for _ in range(length)]
    kind = rng.randrange(5)
    if kind == 0:
        return some
    if kind == 1:
        return [rng.choice(special) if rng.random() < 0.5 else token_id for token_id in some]
    if kind == 2:
        return [token_id if rng.random() < 0.8 else table.vocab_size + rng.randrange(9) for token_id in some]
    if kind == 3 and len(parts) and not table.bytes_in_runs:
        return [
            int(parts[rng.randrange(len(parts))]) if rng.random() < 0.8 else token_id for token_id in some
        ]
    text = "".join(rng.choices(CHARACTERS, k=length))
    return tokenizer.encode(text, add_special_tokens=rng.random() < 0.5).ids


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [SEQUENCES, pytest.param(SEQUENCES_SLOW, marks=pytest.mark.slow)])
def test_every_text_of_a_real_tokenizer_is_the_librarys(name, count):
    """Answers would differ from what the model's own tokenizer says."""
    tokenizer, table = _load(name)
    decoder = load_decoder(tokenizer)
    assert isinstance(decoder, TableDecoder)
    assert decoder.kind is DecoderKind.TABLE
    rng = random.Random(f"{name} {count}")
    for number in range(count):
        token_ids = _sequence(tokenizer, table, rng)
        skip = number % 2 == 0
        wanted = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert _streamed(decoder, token_ids, rng, skip=skip) == wanted, token_ids
