"""The text of table decoders where every byte counts; see also tests/conformance/test_decoder_texts.py.

Texts come out of `stream` as a client would get them: one delta a chunk, then what was
held at the end.
"""

from __future__ import annotations

import pytest
from decoding import BROKEN, decode_rows, ids_of, one_by_one, stream, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models

from manager.detokenize import DecoderKind, load_decoder


def test_a_character_that_the_output_broke_is_shown_though_the_prompt_began_it():
    """The model's own bytes would vanish."""
    decoder = load_decoder(tiny_tokenizer("bytelevel"))
    assert "".join(one_by_one(decoder, [159, 97], prompt=[240])) == BROKEN + "a"
    assert one_by_one(decoder, [159], prompt=[240]) == ["", BROKEN]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a", "a"),
        (b"\xe5", BROKEN),
        (b"\xe5\x8f", BROKEN),  # two bytes of one character, so one sign of it
        (b"\xe5\x8f\xab", "叫"),
        (b"\xe5\x8fa", BROKEN + "a"),
        (b"\xe5\x8f\xab\xffa", "叫" + BROKEN + "a"),
        (b"\n\xe4\n", "\n" + BROKEN + "\n"),
        (b"\xff\xff", BROKEN * 2),
    ],
)
def test_a_bad_byte_token_takes_nothing_else_along(raw, text):
    """One bad byte would turn good characters, sent already, into U+FFFD."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteFallback()
    decoder = load_decoder(tokenizer)
    assert decoder.kind is DecoderKind.TABLE
    assert "".join(one_by_one(decoder, list(raw))) == text


def test_every_pair_of_bytes_decodes_as_python_decodes_it():
    """Overlong forms, surrogates and what lies beyond U+10FFFF are told by the second byte."""
    edges = [0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xE0, 0xF0, 0xFF]
    pairs = b"".join(bytes([first, second]) + b"a" for first in range(256) for second in range(256))
    longer = b"".join(
        bytes([first, second, third, fourth]) + b"a"
        for first in (0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF1, 0xF4)
        for second in edges
        for third in edges
        for fourth in edges
    )
    decoder = load_decoder(tiny_tokenizer("bytelevel"))
    for raw in (pairs, longer):
        wanted = raw.decode("utf-8", "replace")
        assert "".join(stream(decoder, [list(raw)])) == wanted
        slot = decoder.open(ids_of([]))  # one byte a row, so that all of them are pending once
        assert "".join(decode_rows(decoder, [(slot, [byte]) for byte in raw])) == wanted
        decoder.close(slot)
