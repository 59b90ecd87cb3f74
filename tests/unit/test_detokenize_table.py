"""The table of bytes: what it says of each id, and what it refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from manager._detok import lib
from manager.detokenize import (
    DecoderKind,
    DecodeTable,
    TableDecoder,
    TableUnfitError,
    Vocabulary,
    load_decoder,
)
from manager.detokenize.proof import difference, sequences_needed
from manager.errors import DetokenizeError

DATA = Path(__file__).parents[1] / "data"
MARK_TO_SPACE = decoders.Replace("▁", " ")


def _table(tokens, decoder, *, special=(), added=()):
    tokenizer = _tokenizer(tokens, decoder, special=special, added=added)
    return DecodeTable.build(tokenizer, Vocabulary.of(tokenizer))


def _tokenizer(tokens, decoder, *, special=(), added=()):
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    return tokenizer


def _texts(table):
    return [table.text_of(token_id) for token_id in range(table.vocab_size)]


def _first_texts(table):
    offsets = table.first_offsets.tolist()
    return [table.first_text[start:end].tobytes() for start, end in itertools.pairwise(offsets)]


def test_byte_level_tokens_are_the_bytes_their_characters_stand_for():
    """Every letter outside ASCII would come out as two wrong ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    table = _table([*alphabet, "Ġthe"], decoders.ByteLevel())
    by_character = dict(zip(alphabet, _texts(table), strict=False))
    assert sorted(by_character.values()) == [bytes([byte]) for byte in range(256)]
    assert table.text_of(256) == b" the"
    for text in ("\x00 \n~\x7f\x80\xa0\xadé", "߿ࠀ￼", "𐀀😀\U0010ffff"):
        written = pre_tokenizer.pre_tokenize_str(text)[0][0]
        assert b"".join(by_character[character] for character in written) == text.encode()


def test_added_tokens_outside_the_alphabet_are_text():
    """ "工具" and "<tool call>" would lose letters or raise."""
    table = _table(["a"], decoders.ByteLevel(), added=["工具", "<tool call>", "é !"])
    assert _texts(table) == [b"a", "工具".encode(), b"<tool call>", "é !".encode()]


def test_flags_say_what_is_known_special_and_whole():
    """Parts of characters would be copied out as if they were characters."""
    table = _table(["a", "ä¸", "<s>"], decoders.ByteLevel(), special=["<s>"])  # noqa: RUF001
    known, special, whole = lib.DETOK_ID_KNOWN, lib.DETOK_ID_SPECIAL, lib.DETOK_ID_WHOLE
    assert table.flags.tolist() == [known | whole, known, known | special | whole]


def test_ids_that_the_vocabulary_leaves_out_are_unknown():
    """A hole would be counted as a token that says nothing."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 5}, []))
    tokenizer.decoder = decoders.ByteLevel()
    table = DecodeTable.build(tokenizer, Vocabulary.of(tokenizer))
    assert table.vocab_size == 6
    assert np.flatnonzero(table.flags & lib.DETOK_ID_KNOWN).tolist() == [0, 5]


def test_a_piece_that_is_there_twice_is_known_under_both_ids():
    """The library decodes both ids, but its vocabulary names only one."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("a", -2.0), ("b", -3.0)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    assert Vocabulary.of(tokenizer).tokens == ["<unk>", "a", "a", "b"]
    assert load_decoder(tokenizer).kind is DecoderKind.TABLE


def test_specials_are_told_by_their_text_as_the_library_does():
    """A special token that the model knows too would be shown."""
    vocabulary = Vocabulary.of(_tokenizer(["a", "<s>", "b"], None, special=["<s>", "</s>"]))
    assert vocabulary.tokens == ["a", "<s>", "b", "</s>"]
    assert vocabulary.special.tolist() == [False, True, False, True]


def test_byte_fallback_tokens_are_single_bytes():
    """ "<0xE4>" would be shown as it is written."""
    decoder = decoders.Sequence(
        [MARK_TO_SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    table = _table(["▁a", "<0xE4>", "<0x0a>", "<0xE4", "<0xGG>"], decoder)
    assert _texts(table) == [b" a", b"\xe4", b"\n", b"<0xE4", b"<0xGG>"]
    assert (table.strip_byte, table.strip_count, table.bytes_in_runs) == (ord(" "), 1, True)
    assert table.first_text is None


def test_wordpiece_marks_the_first_token_and_cleans_each():
    """ "do n ' t" where the library says "do n't"."""
    tokens = ["don", "##'", "##t", "'", ".", "n't", "do not"]
    table = _table(tokens, decoders.WordPiece("##", True))
    assert _texts(table) == [b" don", b"'", b"t", b" '", b".", b"n't", b" don't"]
    assert _first_texts(table) == [b"don", b"##'", b"##t", b"'", b".", b"n't", b"do not"]
    assert _texts(_table(tokens, decoders.WordPiece("##", False)))[4:] == [b" .", b" n't", b" do not"]


def test_metaspace_takes_every_mark_off_the_first_token():
    """Texts would begin with spaces that the library leaves out."""
    table = _table(["▁▁a", "b▁"], decoders.Metaspace())
    assert (_texts(table), _first_texts(table)) == ([b"  a", b"b "], [b"a", b"b"])
    never = _table(["▁▁a", "b▁"], decoders.Metaspace(prepend_scheme="never"))
    assert _first_texts(never) == [b"  a", b"b "]


def test_a_decoder_of_several_steps_on_tokens_is_followed_step_by_step():
    """Sequences in sequences are how converters write what they mean."""
    inner = decoders.Sequence([decoders.Replace("xx", "▁"), decoders.Strip("_", 2, 0)])
    decoder = decoders.Sequence([inner, decoders.Metaspace(), decoders.Fuse()])
    tokens = ["___a", "_xxb", "c"]
    table = _table(tokens, decoder)
    assert _texts(table) == [b"_a", b" b", b"c"]
    tokenizer = _tokenizer(tokens, decoder)
    assert load_decoder(tokenizer).kind is DecoderKind.TABLE


def test_a_mark_put_together_from_bytes_is_replaced_like_any_other():
    """Where bytes are joined before marks are replaced, the library replaces these, too."""
    decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), MARK_TO_SPACE, decoders.Strip(" ", 1, 0)]
    )
    tokenizer = _tokenizer(["a", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))], decoder)
    table = DecodeTable.build(tokenizer, Vocabulary.of(tokenizer))
    assert (table.swap_from, table.swap_to) == ("▁".encode(), b" ")
    loaded = load_decoder(tokenizer)
    assert loaded.kind is DecoderKind.TABLE
    for token_ids in ([0, *(2 + byte for byte in "▁é▁".encode()), 1], [2 + byte for byte in "▁▁".encode()]):
        slot = loaded.open(np.empty(0, np.int32))
        text, _ = loaded.decode(
            np.array([slot], np.uint32), np.array([len(token_ids)], np.uint32), np.array(token_ids, np.int32)
        )
        assert text.tobytes().decode() == tokenizer.decode(token_ids)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([decoders.BPEDecoder()], "beyond one token"),
        ([decoders.CTC()], "beyond one token"),
        ([decoders.Replace(Regex("a+"), "b")], "regular expression"),
        ([decoders.Fuse(), decoders.Replace("ab", "c")], "joined text"),
        ([decoders.Fuse(), decoders.Replace("a", "12345")], "joined text"),
        ([decoders.Fuse(), decoders.Replace("\ufffd", "?")], "joined text"),
        ([decoders.Fuse(), decoders.Replace("a", "b"), decoders.Replace("b", "c")], "two decoder steps"),
        ([decoders.Fuse(), decoders.Metaspace()], "joined text"),
        ([decoders.Fuse(), decoders.WordPiece()], "joined text"),
        ([decoders.Fuse(), decoders.ByteLevel()], "joined text"),
        ([decoders.ByteLevel(), decoders.ByteFallback()], "joined text"),
        ([decoders.Fuse(), decoders.Strip(" ", 1, 1)], "the end"),
        ([decoders.Fuse(), decoders.Strip("é", 1, 0)], "runs of byte tokens"),
        ([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)], "runs of byte tokens"),
        ([decoders.Fuse(), decoders.Strip(" ", 1, 0), decoders.Replace("a", "b")], "joined text"),
    ],
)
def test_steps_that_no_table_can_stand_for_are_refused(steps, reason):
    """A wrong table would be worse than a slow decoder."""
    with pytest.raises(TableUnfitError, match=reason):
        _table(["a", "b"], decoders.Sequence(steps))


def test_a_decoder_written_in_python_has_no_table():
    """It cannot be read, so nothing is known about it."""

    class Shouting:
        def decode_chain(self, tokens):
            return [token.upper() for token in tokens]

    tokenizer = _tokenizer(["a", "b"], decoders.Decoder.custom(Shouting()))
    loaded = load_decoder(tokenizer)
    assert loaded.kind is DecoderKind.LIBRARY
    assert "no definition" in loaded.reason
    assert loaded.decode_one(1) == "B"


def test_an_absurdly_large_id_is_refused():
    """One wrong number in a file would take all memory."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 2**31}, []))
    with pytest.raises(DetokenizeError, match="too large"):
        load_decoder(tokenizer)


def test_an_empty_vocabulary_is_no_fault():
    """A tokenizer under construction can be loaded."""
    loaded = load_decoder(Tokenizer(models.BPE()))
    assert loaded.vocab_size == 0
    assert loaded.decode_one(0) == ""


@pytest.mark.parametrize("broken", ["falling", "past the end", "too few", "not whole", "strip"])
def test_a_table_that_contradicts_itself_is_refused(broken):
    """A table in shared memory is somebody else's word; reading past it would kill the worker."""
    table = _table(["a", "ä¸", "c"], decoders.ByteLevel())  # noqa: RUF001
    TableDecoder(table, slots_max=1, reason="sound")
    offsets = table.text_offsets.copy()
    changed = {
        "falling": {"text_offsets": offsets[[0, 2, 1, 3]]},
        "past the end": {"text_offsets": offsets + np.array([0, 0, 0, 1], np.uint32)},
        "too few": {"text_offsets": offsets[:-1]},
        "not whole": {"flags": table.flags | np.uint8(lib.DETOK_ID_WHOLE)},
        "strip": {"strip_byte": 0x80},
    }[broken]
    with pytest.raises(DetokenizeError):
        TableDecoder(replace(table, **changed), slots_max=1, reason="broken")


@pytest.mark.parametrize("name", ["bytelevel", "bytefallback", "wordpiece", "metaspace"])
def test_the_proof_finds_any_text_that_is_wrong(name):
    """A proof that passes everything proves nothing. One id is given another's text."""
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizers" / f"{name}.json"))
    table = DecodeTable.build(tokenizer, Vocabulary.of(tokenizer))
    slots_max = sequences_needed(table.vocab_size)
    for token_id in (300, 777, table.vocab_size - 1):
        text = table.text.copy()
        text[int(table.text_offsets[token_id])] ^= 1
        false = TableDecoder(replace(table, text=text), slots_max=slots_max, reason="false")
        assert difference(false, table, tokenizer) is not None


def test_the_proof_finds_a_start_that_is_not_stripped():
    """The leading space of every answer would be wrong."""
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizers" / "bytefallback.json"))
    table = DecodeTable.build(tokenizer, Vocabulary.of(tokenizer))
    false = TableDecoder(
        replace(table, strip_count=0), slots_max=sequences_needed(table.vocab_size), reason="false"
    )
    assert difference(false, table, tokenizer) is not None
