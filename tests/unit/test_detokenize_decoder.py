"""The choice of a decoder; what each promises is in tests/conformance/test_decoders.py."""

from __future__ import annotations

import numpy as np
import pytest
from decoding import DATA, decode_rows, ids_of, one_by_one, tiny_tokenizer, trained
from tokenizers import Tokenizer, decoders, models

from manager.detokenize import DecoderKind, load_decoder
from manager.detokenize.library import CONTEXT_MAX, HELD_MAX
from manager.errors import DetokenizeError


def _byte_tokens():
    """Byte b is id 9 + b; no word mark, nothing stripped."""
    words = ["[UNK]", "<s>", "</s>", "hello", " ", "world", "😀", "中", "\n"]
    tokens = words + [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="[UNK]", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("name", ["bytelevel", "bytefallback", "wordpiece", "metaspace"])
def test_every_common_kind_of_tokenizer_gets_a_table(name):
    """It would be fifty times slower, and nobody would know why."""
    tokenizer = trained(name)
    decoder = load_decoder(tokenizer)
    assert decoder.kind is DecoderKind.TABLE
    assert "proved" in decoder.reason
    assert decoder.vocab_size == tokenizer.get_vocab_size()


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (decoders.BPEDecoder(), "BPEDecoder looks beyond one token"),
        (decoders.CTC(), "CTC looks beyond one token"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")]), "joined text"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "looks at the end"),
    ],
)
def test_what_has_no_table_is_decoded_by_the_library_and_says_why(decoder, reason):
    """An operator sees a slow decoder and wants to know the reason."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "c</w>": 2}, []))
    tokenizer.decoder = decoder
    loaded = load_decoder(tokenizer)
    assert loaded.kind is DecoderKind.LIBRARY
    assert reason in loaded.reason
    with pytest.raises(DetokenizeError, match=reason):
        load_decoder(tokenizer, kind=DecoderKind.TABLE)


def test_a_table_that_decodes_otherwise_than_the_library_is_not_used(monkeypatch):
    """A fault in the table's rules, or in a newer library's, would falsify every answer."""
    tokenizer = trained("bytelevel")
    monkeypatch.setattr(
        "manager.detokenize.table._byte_level_bytes",
        lambda tokens: [token.upper().encode() for token in tokens],
    )
    decoder = load_decoder(tokenizer)
    assert decoder.kind is DecoderKind.LIBRARY
    assert "differently" in decoder.reason
    ids = tokenizer.encode("Hello 世界 😀").ids
    assert "".join(one_by_one(decoder, ids)) == "Hello 世界 😀"


def test_words_marked_at_their_end_are_streamed_with_their_spaces():
    """The library leaves the space of the last word out; it must come with the next."""
    tokenizer = Tokenizer(models.BPE({"he": 0, "llo</w>": 1, "world</w>": 2}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    decoder = load_decoder(tokenizer)
    assert one_by_one(decoder, [0, 1, 2, 2]) == ["he", "llo", " world", " world", ""]


def test_a_library_fault_names_itself():
    """A fault of the library would end the worker instead of one request."""

    class Failing:
        def decode(self, token_ids, skip_special_tokens):
            raise OverflowError("no")

    decoder = load_decoder(tiny_tokenizer("bytelevel"), kind=DecoderKind.LIBRARY)
    slot = decoder.open(ids_of([]))
    decoder._library._tokenizer = Failing()
    with pytest.raises(DetokenizeError, match="library failed"):
        decode_rows(decoder, [(slot, [97])])


def test_the_library_is_asked_for_no_more_ids_as_a_text_grows():
    """Each token would cost more than the one before, and the first one a decode of the whole prompt."""
    decoder = load_decoder(tiny_tokenizer("bytelevel"), kind=DecoderKind.LIBRARY)
    real = decoder._library._tokenizer
    asked: list[int] = []

    class Counting:
        def decode(self, token_ids, skip_special_tokens):
            asked.append(len(token_ids))
            return real.decode(token_ids, skip_special_tokens=skip_special_tokens)

    decoder._library._tokenizer = Counting()
    slot = decoder.open(np.full(100_000, 97, np.int32))
    costs = []
    for _ in range(2000):
        asked.clear()
        decode_rows(decoder, [(slot, [104])])
        costs.append(sum(asked))
    assert max(costs[:100]) == max(costs)
    assert max(costs) <= 2 * (CONTEXT_MAX + HELD_MAX + 1)
    assert sum(costs[-1000:]) <= 1.5 * sum(costs[:1000])


def test_no_slots_is_a_fault_of_the_caller():
    """A decoder that refuses every text is a wrong setting."""
    tokenizer = Tokenizer.from_file(str(DATA / "detok" / "bytelevel_tiny.json"))
    with pytest.raises(ValueError, match="slots_max=0"):
        load_decoder(tokenizer, slots_max=0)
