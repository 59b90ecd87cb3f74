"""What every decoder promises about ids and slots, whatever way a process comes to it."""

from __future__ import annotations

import numpy as np
import pytest
from decoding import BROKEN, DATA, decode_rows, ids_of, one_by_one, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models

from manager.errors import DetokenizeError, UnavailableError


def test_unknown_ids_add_nothing_and_are_counted(load):
    """One model's bad id ended the output of every request in the batch."""
    decoder = load(tiny_tokenizer("bytelevel"))
    bad, good = (decoder.open(ids_of([])) for _ in range(2))
    rows = [(bad, [97, -1, 300, 98]), (good, [257, 259, 111]), (bad, [2**31 - 1, -(2**31)])]
    assert decode_rows(decoder, rows) == ["ab", "hello", ""]
    assert (decoder.unknown_ids(bad), decoder.unknown_ids(good)) == (4, 0)


def test_unknown_ids_of_the_prompt_are_not_counted(load):
    """Image placeholders in a prompt are no fault of the output."""
    decoder = load(tiny_tokenizer("bytelevel"))
    assert decoder.unknown_ids(decoder.open(ids_of([-101, 5000]))) == 0


def test_an_unknown_id_does_not_end_a_character(load):
    """A placeholder between two bytes would break the character."""
    assert "".join(one_by_one(load(tiny_tokenizer("bytelevel")), [228, -1, 184, 5000, 150])) == "世"


def test_rows_of_one_slot_are_taken_in_order_beside_others(load):
    """Two chunks of a request may arrive in one batch."""
    decoder = load(tiny_tokenizer("bytelevel"))
    one, two = (decoder.open(ids_of([])) for _ in range(2))
    rows = [(one, [228]), (two, [240, 159]), (one, [184]), (one, []), (two, [152, 128]), (one, [150])]
    assert decode_rows(decoder, rows) == ["", "", "", "", "😀", "世"]


def test_an_empty_batch_is_fine(load):
    """A step without output must not fail."""
    assert decode_rows(load(tiny_tokenizer("bytelevel")), []) == []


def test_many_texts_at_once_keep_their_own_state(load):
    """States would be mixed up, or lost, when the table of slots grows."""
    decoder = load(tiny_tokenizer("bytelevel"))
    slots = [decoder.open(ids_of([])) for _ in range(150)]
    assert len(set(slots)) == 150
    assert decode_rows(decoder, [(slot, [228, 184]) for slot in slots]) == [""] * 150
    more = [decoder.open(ids_of([])) for _ in range(150)]
    assert decode_rows(decoder, [(slot, [150, 97]) for slot in slots]) == ["世a"] * 150
    assert decode_rows(decoder, [(slot, [97]) for slot in more]) == ["a"] * 150


def test_a_full_table_refuses_the_new_text_and_keeps_the_old(load):
    """The oldest text would be pushed out while it runs."""
    tokenizer = Tokenizer.from_file(str(DATA / "detok" / "bytelevel_tiny.json"))
    decoder = load(tokenizer, slots_max=3)
    slots = [decoder.open(ids_of([])) for _ in range(3)]
    decode_rows(decoder, [(slot, [228, 184]) for slot in slots])
    with pytest.raises(UnavailableError, match="slots_max=3"):
        decoder.open(ids_of([]))
    assert decode_rows(decoder, [(slot, [150, 97]) for slot in slots]) == ["世a"] * 3
    decoder.close(slots[1])
    assert decoder.open(ids_of([])) == slots[1]


def test_a_slot_used_again_knows_nothing_of_the_text_before(load):
    """Half a character of somebody else's answer would come out."""
    decoder = load(tiny_tokenizer("bytefallback"))
    first = decoder.open(ids_of([261]), skip_special_tokens=False)
    decode_rows(decoder, [(first, [3 + 0xE4, -1])])
    decoder.close(first)
    again = decoder.open(ids_of([]))
    assert again == first
    assert decoder.unknown_ids(again) == 0
    assert decoder.finish(again) == b""
    assert decode_rows(decoder, [(again, [1, 262])]) == ["world"]


def test_finish_leaves_the_slot_open(load):
    """A text that is flushed early goes on where it was."""
    decoder = load(tiny_tokenizer("bytelevel"))
    slot = decoder.open(ids_of([]))
    assert decode_rows(decoder, [(slot, [97, 228])]) == ["a"]
    assert decoder.finish(slot).decode() == BROKEN
    assert decoder.finish(slot) == b""
    assert decode_rows(decoder, [(slot, [98])]) == ["b"]


@pytest.mark.parametrize("slot", [0, 1, 63, 64, 2**32 - 1])
def test_a_slot_that_is_not_open_is_refused(load, slot):
    """Text would go to nobody, or to somebody else."""
    decoder = load(tiny_tokenizer("bytelevel"))
    decoder.close(decoder.open(ids_of([])))
    with pytest.raises(DetokenizeError):
        decode_rows(decoder, [(slot, [97])])
    for method in (decoder.close, decoder.finish, decoder.unknown_ids):
        with pytest.raises(DetokenizeError, match="not open"):
            method(slot)


def test_a_refused_batch_has_changed_nothing(load):
    """A batch could not be tried again after one bad row."""
    decoder = load(tiny_tokenizer("bytelevel"))
    slot = decoder.open(ids_of([]))
    decode_rows(decoder, [(slot, [228])])
    for slots, counts in (([slot, 60], [1, 1]), ([slot], [1]), ([slot], [3]), ([slot, slot], [2**32 - 1, 3])):
        with pytest.raises(DetokenizeError):
            decoder.decode(np.array(slots, np.uint32), np.array(counts, np.uint32), ids_of([184, 97]))
    assert decode_rows(decoder, [(slot, [184, 150])]) == ["世"]


@pytest.mark.parametrize("wrong", ["slots", "counts", "token_ids", "two dimensions", "lengths"])
def test_columns_of_another_type_are_refused(load, wrong):
    """An id of 2**32 + 97 in a wider column would be decoded as "a"."""
    decoder = load(tiny_tokenizer("bytelevel"))
    slots, counts, token_ids = np.zeros(1, np.uint32), np.ones(1, np.uint32), ids_of([97])
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


def test_columns_may_have_gaps_and_be_read_only(load):
    """Columns are views into a ring, and of every other row if somebody slices."""
    decoder = load(tiny_tokenizer("bytelevel"))
    slot = decoder.open(ids_of([]))
    wide = ids_of([228, 0, 184, 0, 150, 0])
    wide.flags.writeable = False
    text, lengths = decoder.decode(np.array([slot], np.uint32), np.array([3], np.uint32), wide[::2])
    assert (text.tobytes().decode(), lengths.tolist()) == ("世", [3])


def test_a_batch_may_be_larger_than_any_before(load):
    """Text beyond the first buffer would be cut."""
    decoder = load(tiny_tokenizer("bytelevel"))
    slot = decoder.open(ids_of([]))
    assert decode_rows(decoder, [(slot, [257] * 40_000)]) == ["he" * 40_000]
    assert decode_rows(decoder, [(slot, [257])]) == ["he"]


def test_text_handed_out_is_not_overwritten_by_the_next_batch(load):
    """A caller that keeps a delta for later would send another one's text."""
    decoder = load(tiny_tokenizer("bytelevel"))
    slot = decoder.open(ids_of([]))
    arguments = (np.array([slot], np.uint32), np.ones(1, np.uint32))
    first, _ = decoder.decode(*arguments, ids_of([97]))
    decoder.decode(*arguments, ids_of([98]))
    assert first.tobytes() == b"a"


def test_the_text_of_one_id_keeps_its_word_mark_and_shows_specials(load):
    """Tokens that differ only in their space would look the same beside log probabilities."""
    vocab = {"<unk>": 0, "▁true": 1, "true": 2, "▁false": 3, "false": 4, "▁": 5, "▁▁": 6, "▁▁▁": 7, "<s>": 8}
    tokenizer = Tokenizer(models.BPE(vocab | {"<0xE4>": 9, "<0x41>": 10}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    decoder = load(tokenizer)
    texts = [decoder.decode_one(token_id) for token_id in range(1, 12)]
    assert texts == [" true", "true", " false", "false", " ", "  ", "   ", "<s>", BROKEN, "A", ""]
    assert decoder.decode_one(-1) == ""
