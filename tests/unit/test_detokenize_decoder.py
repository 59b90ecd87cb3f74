"""What decoders of both kinds promise about ids and slots, and the choice between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from manager.detokenize import DecoderKind, load_decoder
from manager.errors import DetokenizeError, UnavailableError

DATA = Path(__file__).parents[1] / "data"
BROKEN = "\N{REPLACEMENT CHARACTER}"

both_kinds = pytest.mark.parametrize("kind", list(DecoderKind), ids=lambda kind: kind.value)


def _ids(token_ids):
    return np.array(token_ids, np.int32)


def _decode(decoder, rows):
    """Rows of (slot, ids) in one call; the text of each."""
    text, lengths = decoder.decode(
        np.array([slot for slot, _ in rows], np.uint32),
        np.array([len(token_ids) for _, token_ids in rows], np.uint32),
        _ids([token_id for _, token_ids in rows for token_id in token_ids]),
    )
    assert text.dtype == np.uint8
    assert lengths.dtype == np.uint32
    assert int(lengths.sum()) == len(text)
    ends = np.cumsum(lengths).tolist()
    return [
        text[start:end].tobytes().decode() for start, end in zip([0, *ends][: len(ends)], ends, strict=True)
    ]


def _stream(decoder, chunks, *, prompt=(), skip=True):
    """Deltas of the chunks, and last what was held at the end."""
    slot = decoder.open(_ids(prompt), skip_special_tokens=skip)
    deltas = [_decode(decoder, [(slot, chunk)])[0] for chunk in chunks]
    deltas.append(decoder.finish(slot).decode())
    decoder.close(slot)
    return deltas


def _one_by_one(decoder, token_ids, **options):
    return _stream(decoder, [[token_id] for token_id in token_ids], **options)


def _tiny(name, kind=None):
    return load_decoder(Tokenizer.from_file(str(DATA / "detok" / f"{name}_tiny.json")), kind=kind)


def _trained(name):
    return Tokenizer.from_file(str(DATA / "tokenizers" / f"{name}.json"))


def _byte_tokens():
    """Byte b is id 9 + b; no word mark, nothing stripped."""
    words = ["[UNK]", "<s>", "</s>", "hello", " ", "world", "😀", "中", "\n"]
    tokens = words + [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="[UNK]", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@both_kinds
def test_unknown_ids_add_nothing_and_are_counted(kind):
    """One model's bad id ended the output of every request in the batch."""
    decoder = _tiny("bytelevel", kind)
    bad, good = (decoder.open(_ids([])) for _ in range(2))
    rows = [(bad, [97, -1, 300, 98]), (good, [257, 259, 111]), (bad, [2**31 - 1, -(2**31)])]
    assert _decode(decoder, rows) == ["ab", "hello", ""]
    assert (decoder.unknown_ids(bad), decoder.unknown_ids(good)) == (4, 0)


@both_kinds
def test_unknown_ids_of_the_prompt_are_not_counted(kind):
    """Image placeholders in a prompt are no fault of the output."""
    decoder = _tiny("bytelevel", kind)
    assert decoder.unknown_ids(decoder.open(_ids([-101, 5000]))) == 0


@both_kinds
def test_an_unknown_id_does_not_end_a_character(kind):
    """A placeholder between two bytes would break the character."""
    assert "".join(_one_by_one(_tiny("bytelevel", kind), [228, -1, 184, 5000, 150])) == "世"


@both_kinds
def test_rows_of_one_slot_are_taken_in_order_beside_others(kind):
    """Two chunks of a request may arrive in one batch."""
    decoder = _tiny("bytelevel", kind)
    one, two = (decoder.open(_ids([])) for _ in range(2))
    rows = [(one, [228]), (two, [240, 159]), (one, [184]), (one, []), (two, [152, 128]), (one, [150])]
    assert _decode(decoder, rows) == ["", "", "", "", "😀", "世"]


@both_kinds
def test_an_empty_batch_is_fine(kind):
    """A step without output must not fail."""
    assert _decode(_tiny("bytelevel", kind), []) == []


@both_kinds
def test_many_texts_at_once_keep_their_own_state(kind):
    """States would be mixed up, or lost, when the table of slots grows."""
    decoder = _tiny("bytelevel", kind)
    slots = [decoder.open(_ids([])) for _ in range(150)]
    assert len(set(slots)) == 150
    assert _decode(decoder, [(slot, [228, 184]) for slot in slots]) == [""] * 150
    more = [decoder.open(_ids([])) for _ in range(150)]
    assert _decode(decoder, [(slot, [150, 97]) for slot in slots]) == ["世a"] * 150
    assert _decode(decoder, [(slot, [97]) for slot in more]) == ["a"] * 150


@both_kinds
def test_a_full_table_refuses_the_new_text_and_keeps_the_old(kind):
    """The oldest text would be pushed out while it runs."""
    tokenizer = Tokenizer.from_file(str(DATA / "detok" / "bytelevel_tiny.json"))
    decoder = load_decoder(tokenizer, slots_max=3, kind=kind)
    slots = [decoder.open(_ids([])) for _ in range(3)]
    _decode(decoder, [(slot, [228, 184]) for slot in slots])
    with pytest.raises(UnavailableError, match="slots_max=3"):
        decoder.open(_ids([]))
    assert _decode(decoder, [(slot, [150, 97]) for slot in slots]) == ["世a"] * 3
    decoder.close(slots[1])
    assert decoder.open(_ids([])) == slots[1]


@both_kinds
def test_a_slot_used_again_knows_nothing_of_the_text_before(kind):
    """Half a character of somebody else's answer would come out."""
    decoder = _tiny("bytefallback", kind)
    first = decoder.open(_ids([261]), skip_special_tokens=False)
    _decode(decoder, [(first, [3 + 0xE4, -1])])
    decoder.close(first)
    again = decoder.open(_ids([]))
    assert again == first
    assert decoder.unknown_ids(again) == 0
    assert decoder.finish(again) == b""
    assert _decode(decoder, [(again, [1, 262])]) == ["world"]


@both_kinds
def test_finish_leaves_the_slot_open(kind):
    """A text that is flushed early goes on where it was."""
    decoder = _tiny("bytelevel", kind)
    slot = decoder.open(_ids([]))
    assert _decode(decoder, [(slot, [97, 228])]) == ["a"]
    assert decoder.finish(slot).decode() == BROKEN
    assert decoder.finish(slot) == b""
    assert _decode(decoder, [(slot, [98])]) == ["b"]


@both_kinds
@pytest.mark.parametrize("slot", [0, 1, 63, 64, 2**32 - 1])
def test_a_slot_that_is_not_open_is_refused(kind, slot):
    """Text would go to nobody, or to somebody else."""
    decoder = _tiny("bytelevel", kind)
    decoder.close(decoder.open(_ids([])))
    with pytest.raises(DetokenizeError):
        _decode(decoder, [(slot, [97])])
    for method in (decoder.close, decoder.finish, decoder.unknown_ids):
        with pytest.raises(DetokenizeError, match="not open"):
            method(slot)


@both_kinds
def test_a_refused_batch_has_changed_nothing(kind):
    """A batch could not be tried again after one bad row."""
    decoder = _tiny("bytelevel", kind)
    slot = decoder.open(_ids([]))
    _decode(decoder, [(slot, [228])])
    for slots, counts in (([slot, 60], [1, 1]), ([slot], [1]), ([slot], [3]), ([slot, slot], [2**32 - 1, 3])):
        with pytest.raises(DetokenizeError):
            decoder.decode(np.array(slots, np.uint32), np.array(counts, np.uint32), _ids([184, 97]))
    assert _decode(decoder, [(slot, [184, 150])]) == ["世"]


@both_kinds
@pytest.mark.parametrize("wrong", ["slots", "counts", "token_ids", "two dimensions", "lengths"])
def test_columns_of_another_type_are_refused(kind, wrong):
    """An id of 2**32 + 97 in a wider column would be decoded as "a"."""
    decoder = _tiny("bytelevel", kind)
    slots, counts, token_ids = np.zeros(1, np.uint32), np.ones(1, np.uint32), _ids([97])
    if wrong == "slots":
        slots = slots.astype(np.int64)
    elif wrong == "counts":
        counts = counts.astype(np.int32)
    elif wrong == "token_ids":
        token_ids = token_ids.astype(np.int64)
    elif wrong == "two dimensions":
        token_ids = token_ids.reshape(1, 1)
    else:
        counts = np.ones(2, np.uint32)
    with pytest.raises(TypeError):
        decoder.decode(slots, counts, token_ids)
    with pytest.raises(TypeError):
        decoder.open(np.zeros(1, np.int64))


@both_kinds
def test_columns_may_have_gaps_and_be_read_only(kind):
    """Columns are views into a ring, and of every other row if somebody slices."""
    decoder = _tiny("bytelevel", kind)
    slot = decoder.open(_ids([]))
    wide = _ids([228, 0, 184, 0, 150, 0])
    wide.flags.writeable = False
    text, lengths = decoder.decode(np.array([slot], np.uint32), np.array([3], np.uint32), wide[::2])
    assert (text.tobytes().decode(), lengths.tolist()) == ("世", [3])


@both_kinds
def test_a_batch_may_be_larger_than_any_before(kind):
    """Text beyond the first buffer would be cut."""
    decoder = _tiny("bytelevel", kind)
    slot = decoder.open(_ids([]))
    assert _decode(decoder, [(slot, [257] * 40_000)]) == ["he" * 40_000]
    assert _decode(decoder, [(slot, [257])]) == ["he"]


@both_kinds
def test_text_handed_out_is_not_overwritten_by_the_next_batch(kind):
    """A caller that keeps a delta for later would send another one's text."""
    decoder = _tiny("bytelevel", kind)
    slot = decoder.open(_ids([]))
    arguments = (np.array([slot], np.uint32), np.ones(1, np.uint32))
    first, _ = decoder.decode(*arguments, _ids([97]))
    decoder.decode(*arguments, _ids([98]))
    assert first.tobytes() == b"a"


@both_kinds
def test_the_text_of_one_id_keeps_its_word_mark_and_shows_specials(kind):
    """Tokens that differ only in their space would look the same beside log probabilities."""
    vocab = {"<unk>": 0, "▁true": 1, "true": 2, "▁false": 3, "false": 4, "▁": 5, "▁▁": 6, "▁▁▁": 7, "<s>": 8}
    tokenizer = Tokenizer(models.BPE(vocab | {"<0xE4>": 9, "<0x41>": 10}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    decoder = load_decoder(tokenizer, kind=kind)
    texts = [decoder.decode_one(token_id) for token_id in range(1, 12)]
    assert texts == [" true", "true", " false", "false", " ", "  ", "   ", "<s>", BROKEN, "A", ""]
    assert decoder.decode_one(-1) == ""


@pytest.mark.parametrize("name", ["bytelevel", "bytefallback", "wordpiece", "metaspace"])
def test_every_common_kind_of_tokenizer_gets_a_table(name):
    """It would be fifty times slower, and nobody would know why."""
    tokenizer = _trained(name)
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
    tokenizer = _trained("bytelevel")
    monkeypatch.setattr(
        "manager.detokenize.table._byte_level_bytes",
        lambda tokens: [token.upper().encode() for token in tokens],
    )
    decoder = load_decoder(tokenizer)
    assert decoder.kind is DecoderKind.LIBRARY
    assert "differently" in decoder.reason
    ids = tokenizer.encode("Hello 世界 😀").ids
    assert "".join(_one_by_one(decoder, ids)) == "Hello 世界 😀"


def test_words_marked_at_their_end_are_streamed_with_their_spaces():
    """The library leaves the space of the last word out; it must come with the next."""
    tokenizer = Tokenizer(models.BPE({"he": 0, "llo</w>": 1, "world</w>": 2}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    decoder = load_decoder(tokenizer)
    assert _one_by_one(decoder, [0, 1, 2, 2]) == ["he", "llo", " world", " world", ""]


def test_a_library_fault_names_itself():
    """A fault of the library would end the worker instead of one request."""

    class Failing:
        def decode(self, token_ids, skip_special_tokens):
            raise OverflowError("no")

    decoder = _tiny("bytelevel", DecoderKind.LIBRARY)
    slot = decoder.open(_ids([]))
    decoder._library._tokenizer = Failing()
    with pytest.raises(DetokenizeError, match="library failed"):
        _decode(decoder, [(slot, [97])])


def test_no_slots_is_a_fault_of_the_caller():
    """A decoder that refuses every text is a wrong setting."""
    tokenizer = Tokenizer.from_file(str(DATA / "detok" / "bytelevel_tiny.json"))
    with pytest.raises(ValueError, match="slots_max=0"):
        load_decoder(tokenizer, slots_max=0)
