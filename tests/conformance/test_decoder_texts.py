"""The text that comes out of every decoder, delta by delta.

Texts come out of `stream` as a client would get them: one delta a chunk, then what was held at the end.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decoding import BROKEN, DATA, decode_rows, ids_of, one_by_one, stream, tiny_tokenizer, trained
from tokenizers import AddedToken, Tokenizer, decoders, models

from manager.detokenize import PROMPT_TAIL_MAX, DecoderKind
from manager.stop import StopMatcher

REAL_TOKENIZERS = Path(__file__).parents[2] / ".cache" / "tokenizers"


def _joined_words():
    """Whole words, no decoder: the library joins them by spaces."""
    vocab = {"<s>": 0, "</s>": 1, "[UNK]": 2, "hello": 3, "world": 4, "世界": 5, "hi": 6}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def _byte_tokens():
    """Byte b is id 9 + b; no word mark, nothing stripped."""
    words = ["[UNK]", "<s>", "</s>", "hello", " ", "world", "😀", "中", "\n"]
    tokens = words + [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="[UNK]", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def _cases():
    for path in sorted((DATA / "detok").glob("*.json")):
        if not path.stem.endswith("_tiny"):
            for number, case in enumerate(json.loads(path.read_text())):
                yield pytest.param(case, id=f"{path.stem}-{number}")


@pytest.mark.parametrize(
    ("prompt", "chunks", "skip", "deltas"),
    [
        ([3], [[4], [5], [6]], True, [" world", " 世界", " hi"]),
        ([5], [[3], [4]], True, [" hello", " world"]),
        ([-101, 2_000_000_000, 3], [[4], [5]], True, [" world", " 世界"]),
        ([3], [[-102, 2_000_000_000], [4]], False, ["", " world"]),
        ([3], [[0, 1], [4], [1]], True, ["", " world", ""]),
        ([3], [[0, 1], [4], [1]], False, [" <s> </s>", " world", " </s>"]),
        ([], [[0, 3], [4]], True, ["hello", " world"]),
        ([0], [[3], [4]], True, ["hello", " world"]),
        ([0], [[3], [4]], False, [" hello", " world"]),
    ],
)
@pytest.mark.parametrize("spaces", [True, False])
def test_words_are_joined_to_the_prompt(*, load, prompt, chunks, skip, spaces, deltas):
    """The first word of an answer would stick to the prompt, or begin with a space."""
    decoder = load(_joined_words())
    slot = decoder.open(ids_of(prompt), skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    assert [decode_rows(decoder, [(slot, chunk)])[0] for chunk in chunks] == deltas
    assert decoder.finish(slot) == b""


@pytest.mark.parametrize(
    ("prompt", "chunks", "deltas"),
    [
        ([3], [[4, 249], [168], [161, 137], [5]], [" ", "", "😀", "world"]),
        ([], [[7, 249], [168], [161, 137], [4, 5]], ["中", "", "😀", " world"]),
        # the prompt began the character, the output completes it: it is the output's
        ([7, 249], [[168], [161, 137], [4, 5]], ["", "😀", " world"]),
        ([3], [[8], [7], [249, 168], [161, 137]], ["\n", "中", "", "😀"]),
        ([3], [[4, 5], []], [" world", ""]),
    ],
)
def test_characters_of_byte_tokens_come_out_whole(load, prompt, chunks, deltas):
    """Clients would see U+FFFD in the middle of an emoji, for good."""
    decoder = load(_byte_tokens())
    assert stream(decoder, chunks, prompt=prompt) == [*deltas, ""]


def test_an_incomplete_character_is_shown_at_the_end(load):
    """Output cut at its length limit would end in silence about the bytes that were there."""
    decoder = load(_byte_tokens())
    assert stream(decoder, [[4], [237]], prompt=[3]) == [" ", "", BROKEN]


@pytest.mark.parametrize(
    ("prompt", "skip", "text"),
    [
        ([], True, "world world"),
        ([1], True, "world world"),  # only <s>, and that is left out: a true start
        ([1], False, " world world"),  # <s> has been said
        ([1] * (PROMPT_TAIL_MAX - 1), True, "world world"),
        ([1] * PROMPT_TAIL_MAX, True, " world world"),  # more lies before: it said something
        ([261], True, " world world"),
        ([261, 1], True, " world world"),
        ([1, 282], True, " world world"),
        ([-1], True, "world world"),
        ([261] * 30, True, " world world"),
    ],
)
def test_only_the_true_start_of_a_text_loses_its_space(load, prompt, skip, text):
    """ "Helloworld!" where the answer continues the prompt, " Hello" where it does not."""
    decoder = load(tiny_tokenizer("bytefallback"))
    assert "".join(one_by_one(decoder, [262, 262], prompt=prompt, skip=skip)) == text


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ([228, 184], [150, 97], "世a"),
        ([104, 105, 228], [184, 150, 97], "世a"),
        ([228, 271, 184], [150, 97], "世a"),  # a special token between, left out
        ([240, 159], [97], "a"),  # the broken character is the prompt's
        ([240, 159], [], ""),
        ([150, 150, 228, 184], [150], "世"),
        ([97] * 20 + [228, 184], [150], "世"),
        ([150, 184] * 10, [97], "a"),  # stray bytes only
    ],
)
def test_a_prompt_may_end_inside_a_character(load, prompt, output, text):
    """The whole prompt would come out again in the first delta."""
    assert "".join(one_by_one(load(tiny_tokenizer("bytelevel")), output, prompt=prompt)) == text


@pytest.mark.parametrize("name", ["bytelevel", "bytefallback", "wordpiece", "metaspace"])
@pytest.mark.parametrize(
    "text",
    [
        "Hello here, this is a simple test",
        "My name is Robert and I love working on it so much!",
        "我很感谢你的热情",
        "你好世界 hello 🌍 café résumé naïve",
        "こんにちは Привет мир مرحبا 한국어",
        "🧑‍💻👨‍👩‍👧‍👦 a你b😀c",
    ],
)
def test_prompt_and_deltas_make_the_text_of_all_ids(load, name, text):
    """Answers would differ from what the same ids give in one go."""
    tokenizer = trained(name)
    decoder = load(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for cut in (1, len(ids) // 2, len(ids) - 1):
        prompt, output = ids[:cut], ids[cut:]
        before, wanted = tokenizer.decode(prompt), tokenizer.decode(ids)
        if not wanted.startswith(before):
            continue  # this prompt ends inside a character
        assert before + "".join(one_by_one(decoder, output, prompt=prompt)) == wanted


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", ["bytelevel", "bytefallback", "wordpiece", "metaspace"])
def test_an_echoed_text_is_what_the_library_decodes(load, name, skip):
    """An engine that echoes its prompt is compared byte for byte with the library."""
    tokenizer = trained(name)
    decoder = load(tokenizer)
    special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    ids = tokenizer.encode("  I don't know , isn't it ? 今天 😀👩‍💻 안녕 ▁ é .  ").ids
    for sequence in (ids, special[:1] + ids + special[-1:], special, ids[3:], [*ids, *special, *ids]):
        wanted = tokenizer.decode(sequence, skip_special_tokens=skip)
        assert "".join(one_by_one(decoder, sequence, skip=skip)) == wanted
        assert "".join(stream(decoder, [sequence], skip=skip)) == wanted


def test_added_tokens_join_by_spaces_and_specials_are_left_out(load):
    """The smallest tokenizer there is: no decoder and added tokens only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens([AddedToken("my")])
    tokenizer.add_tokens(["name", "is", "john", "pair"])
    decoder = load(tokenizer)
    assert one_by_one(decoder, [0, 1, 2, 3], skip=False) == ["my", " name", " is", " john", ""]
    assert one_by_one(decoder, [0, 1, 2, 3]) == ["", "name", " is", " john", ""]
    assert one_by_one(decoder, [3], prompt=[0, 1, 2]) == [" john", ""]


def test_only_the_first_token_loses_its_word_mark(load):
    """ "ThisThis" where "This This" was written."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁This", -1.0)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    assert one_by_one(load(tokenizer), [1, 1]) == ["This", " This", ""]


@pytest.mark.parametrize("case", list(_cases()))
def test_a_reported_fault_stays_away(load, case):
    """Each was a fault that users of other servers met; the file's name says which."""
    path = DATA / "detok" / case["tokenizer"]
    if not path.exists():
        path = REAL_TOKENIZERS / case["tokenizer"]
    if not path.exists():
        pytest.skip(f"the tokenizer was not fetched: {path}")
    decoder = load(Tokenizer.from_file(str(path)))
    deltas = stream(decoder, case["chunks"], prompt=case["prompt_ids"], skip=case["skip_special_tokens"])
    for keep in (False, True):
        matcher = StopMatcher(case.get("stop", []), keep=keep)
        sent = [matcher.push(delta.encode()).text.decode() for delta in deltas]
        sent.append(matcher.flush().decode())
        text = "".join(sent)
        if keep and "text_kept" in case:
            assert text == case["text_kept"]
        elif not (keep and "stop" in case):
            assert text in case["texts"]
            assert load.kind is DecoderKind.LIBRARY or text == case["texts"][0]
            for unwanted in case.get("no_delta_contains", []):
                assert not any(unwanted in delta for delta in sent)


def test_stray_bytes_come_out_as_they_come_in(load):
    """A stream of broken bytes showed nothing until its end, and took the square of its length."""
    decoder = load(tiny_tokenizer("bytelevel"))
    deltas = one_by_one(decoder, [128] * 1024)
    assert "".join(deltas) == BROKEN * 1024
    assert all(any(deltas[start : start + 32]) for start in range(0, 992, 32))


def test_skipped_specials_do_not_pile_up(load):
    """3,000 of them cost seconds where each is decoded again with all before it."""
    decoder = load(tiny_tokenizer("bytelevel"))
    assert "".join(one_by_one(decoder, [228, *[272] * 3000, 184, 150])) == "世"


def test_a_character_and_a_half_in_a_token_gives_the_character_at_once(load):
    """The whole character would wait for the next token, or be lost at the end."""
    tokenizer = trained("bytelevel")
    mixed = Tokenizer(models.BPE({"ä¸ŃäºĨæ": 0, "a": 1}, []))  # noqa: RUF001 - 中了 and a first byte
    mixed.decoder = tokenizer.decoder
    decoder = load(mixed)
    assert one_by_one(decoder, [0]) == ["中了", BROKEN]
    assert one_by_one(decoder, [0, 1]) == ["中了", BROKEN + "a", ""]


def test_a_prompt_may_end_inside_a_character_of_a_long_token(load):
    """Only the last bytes of the prompt's last token begin the character."""
    tokenizer = Tokenizer(models.BPE({"ä¸ŃäºĨæ": 0, "ĸ": 1, "ĩ": 2}, []))  # noqa: RUF001 - as above
    tokenizer.decoder = decoders.ByteLevel()
    decoder = load(tokenizer)
    assert one_by_one(decoder, [1, 2], prompt=[0]) == ["", "文", ""]


@pytest.mark.parametrize("text", ["中", "อั", "😀", "한국어", "👩‍💻"])
def test_text_byte_by_byte_comes_out_whole(load, text):
    """Thai, Korean and emoji were streamed as runs of U+FFFD."""
    decoder = load(tiny_tokenizer("bytelevel"))
    deltas = one_by_one(decoder, list(text.encode()) * 32)
    assert "".join(deltas) == text * 32
    assert not any(BROKEN in delta for delta in deltas)
