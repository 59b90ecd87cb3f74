"""Text as it leaves a shard, whichever way the shard decodes: by the table in C, or by the library."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

import shmring
from manager import messages
from manager.detokenize import DecoderKind, load_decoder
from manager.finish import FinishReason, encode
from manager.inbox import Inbox
from manager.shard import DetokShard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DATA = Path(__file__).parents[1] / "data"
REAL_TOKENIZERS = Path(__file__).parents[2] / ".cache" / "tokenizers"
BROKEN = "\N{REPLACEMENT CHARACTER}"
LENGTH = FinishReason.length(9)

both_kinds = pytest.mark.parametrize("kind", list(DecoderKind), ids=lambda kind: kind.value)


class Shard:
    """A shard and what it says: per request its deltas, ids and end, and the aborts it asks for."""

    def __init__(self, name: str, decoder: Any) -> None:
        self._stack = contextlib.ExitStack()
        rings = [self._stack.enter_context(shmring.create(f"{name}.{ring}", 1 << 22)) for ring in "egr"]
        egress, register, reply = rings
        self._scheduler = self._stack.enter_context(egress.producer())
        self._manager = self._stack.enter_context(register.producer())
        consumer = self._stack.enter_context(reply.consumer(poison=True))
        self._shard = DetokShard(
            egress=self._stack.enter_context(egress.consumer(poison=True)),
            register=self._stack.enter_context(register.consumer(poison=True)),
            reply=self._stack.enter_context(reply.producer()),
            decoder=decoder,
        )
        self._inbox = Inbox(consumer, self)
        self._ids = itertools.count(1)
        self.deltas: dict[int, list[str]] = {}
        self.ids: dict[int, list[int]] = {}
        self.counts: dict[int, int] = {}
        self.ends: dict[int, Any] = {}
        self.aborts: list[int] = []

    def on_text(self, request_id: int, text: str, token_ids: Any, count: int, reason: Any) -> None:
        assert request_id not in self.ends, "a word after the last one"
        self.deltas[request_id].append(text)
        self.ids[request_id] += list(token_ids)
        self.counts[request_id] += count
        if reason is not None:
            self.ends[request_id] = reason.to_mapping()

    def on_fail(self, request_id: int, error: Exception) -> None:
        raise AssertionError(f"request {request_id} failed: {error}")

    def on_abort_asked(self, request_id: int) -> None:
        self.aborts.append(request_id)

    def on_result(self, control_id: int, payload: bytes) -> None:
        raise AssertionError((control_id, payload))

    def open(
        self,
        *,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        regexes: Sequence[str] = (),
        keep: bool = False,
        skip: bool = True,
        spaces: bool = True,
        min_new_tokens: int = 0,
    ) -> int:
        request_id = next(self._ids)
        assert messages.REGISTER.push(
            self._manager,
            1,
            np.array([request_id], np.uint64),
            np.array([(min_new_tokens, skip, spaces, keep, False)], messages.OUTPUT_DTYPE),
            np.array([len(prompt)], np.uint32),
            np.array(prompt, np.int32),
            *messages.pack_bytes([messages.pack_stops(stop, regexes)]),
        )
        self.deltas[request_id], self.ids[request_id], self.counts[request_id] = [], [], 0
        return request_id

    def step(self, *rows: tuple[int, Sequence[int], FinishReason | None]) -> None:
        """One frame, and all that comes of it."""
        ends = [encode(reason) for _, _, reason in rows]
        details = (
            messages.pack_bytes([end[2] for end in ends]) if any(end[2] for end in ends) else (None, None)
        )
        assert messages.BATCH.push(
            self._scheduler,
            len(rows),
            np.array([request_id for request_id, _, _ in rows], np.uint64),
            np.array([len(ids) for _, ids, _ in rows], np.uint32),
            np.array([token_id for _, ids, _ in rows for token_id in ids], np.int32),
            np.array([end[0] for end in ends], np.uint8),
            np.array([end[1] for end in ends], np.int64),
            *details,
        )
        while self._shard.do_work(8) or self._inbox.do_work(8):
            pass

    def run(
        self, chunks: Sequence[Sequence[int]], reason: FinishReason | None = LENGTH, **options: Any
    ) -> tuple[str, Any]:
        """The text of one request, and its end; the last chunk carries `reason`."""
        request_id = self.open(**options)
        for number, chunk in enumerate(chunks, 1):
            self.step((request_id, chunk, reason if number == len(chunks) else None))
            if request_id in self.ends:
                break
        return "".join(self.deltas[request_id]), self.ends.get(request_id)

    def text(self, chunks: Sequence[Sequence[int]], **options: Any) -> str:
        return self.run(chunks, **options)[0]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def shards(ring_name: str) -> Iterator[Any]:
    made: list[Shard] = []

    def make(tokenizer: Tokenizer | str, kind: DecoderKind | None = None) -> Shard:
        if isinstance(tokenizer, str):
            tokenizer = Tokenizer.from_file(str(DATA / "detok" / f"{tokenizer}_tiny.json"))
        made.append(Shard(f"{ring_name}.{len(made)}", load_decoder(tokenizer, kind=kind)))
        return made[-1]

    yield make
    for shard in made:
        shard.close()


def _bytes(*texts: str) -> list[list[int]]:
    """Chunks of text as ids of the byte-level tokenizer, whose first 256 ids are the bytes."""
    return [list(text.encode()) for text in texts]


def _cases() -> Iterator[Any]:
    for path in sorted((DATA / "detok").glob("*.json")):
        if not path.stem.endswith("_tiny"):
            for number, case in enumerate(json.loads(path.read_text())):
                yield pytest.param(case, id=f"{path.stem}-{number}")


@both_kinds
@pytest.mark.parametrize("case", list(_cases()))
def test_a_reported_fault_stays_away(shards: Any, kind: DecoderKind, case: dict[str, Any]) -> None:
    """Each was a fault that users of other servers met; the file's name says which."""
    path = DATA / "detok" / case["tokenizer"]
    if not path.exists():
        path = REAL_TOKENIZERS / case["tokenizer"]
    if not path.exists():
        pytest.skip(f"the tokenizer was not fetched: {path}")
    shard = shards(Tokenizer.from_file(str(path)), kind)
    for keep in (False, True):
        request_id = shard.open(
            prompt=case["prompt_ids"][-8:],
            stop=case.get("stop", ()),
            keep=keep,
            skip=case["skip_special_tokens"],
        )
        for chunk in case["chunks"]:
            if request_id not in shard.ends:
                shard.step((request_id, chunk, None))
        if request_id not in shard.ends:
            shard.step((request_id, [], LENGTH))
        text = "".join(shard.deltas[request_id])
        if keep and "text_kept" in case:
            assert text == case["text_kept"]
        elif not (keep and "stop" in case):
            assert text in case["texts"]
            assert kind is DecoderKind.LIBRARY or text == case["texts"][0]
            for unwanted in case.get("no_delta_contains", []):
                assert not any(unwanted in delta for delta in shard.deltas[request_id])


STOPS: dict[str, Any] = {
    "split_with_empty_delta": (["END"], [], ["答 ", "E", "", "N", "Dignored"], "END", "答 ", "答 END"),
    "release_failed_prefix": (["END"], [], ["hi E", "X ", "EN", "Drest"], "END", "hi EX ", "hi EX END"),
    "unicode_stop": (["終わり"], [], ["先 ", "終", "わ", "り後"], "終わり", "先 ", "先 終わり"),
    "length_flushes_prefix": (["END"], [], ["x E", "N", ""], None, "x EN", "x EN"),
    "regex_keeps_actual_match": ([], ["E.D"], ["x E", "A", "D"], "E.D", "x EAD", "x EAD"),
    "regex_literal_is_trimmed": ([], ["E.D"], ["x E", ".", "Drest"], "E.D", "x ", "x E.D"),
    "special_token_text": (
        ["<|end|>"],
        [],
        ["\n<|", "end", "|>tail"],
        "<|end|>",
        "\n",
        "\n<|end|>",
    ),
}


@both_kinds
@pytest.mark.parametrize("is_found_here", [True, False])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("case", STOPS)
def test_stops_over_several_chunks(
    shards: Any, case: str, keep: bool, is_found_here: bool, kind: DecoderKind
) -> None:
    """At no step has a client seen what is not of the answer, whoever finds the stop."""
    stops, regexes, chunks, matched, trimmed, kept = STOPS[case]
    wanted = kept if keep else trimmed
    shard = shards("bytelevel", kind)
    request_id = shard.open(stop=stops, regexes=regexes, keep=keep)
    for number, chunk in enumerate(_bytes(*chunks), 1):
        reason = None
        if number == len(chunks) and not (is_found_here and matched):
            reason = LENGTH if matched is None else FinishReason.stop(matched)
        shard.step((request_id, chunk, reason))
        assert wanted.startswith("".join(shard.deltas[request_id]))
    assert "".join(shard.deltas[request_id]) == wanted
    assert shard.ends[request_id] == (
        LENGTH.to_mapping() if matched is None else {"type": "stop", "matched": matched}
    )
    assert shard.aborts == ([request_id] if matched and is_found_here else [])


@both_kinds
@pytest.mark.parametrize(
    ("text", "stops", "trimmed", "kept"),
    [
        (" The user is a", ["a", "is"], " The user ", " The user is"),
        (" The user is a", ["is", "a"], " The user ", " The user is"),
        ("abc", ["abc", "b"], "a", "ab"),
        ("ab", ["ab", "b"], "", "ab"),
        ("ab", ["b", "ab"], "a", "ab"),
        ("hello world.", ["."], "hello world", "hello world."),
        ("hello world foo", ["world", "foo"], "hello ", "hello world"),
        ("ans\n\nQuestion: A", ["Question"], "ans\n\n", "ans\n\nQuestion"),
        ("a STOP b STOP", ["STOP"], "a ", "a STOP"),
        ("?\n", ["\n"], "?", "?\n"),
        ("aaab", ["aab"], "a", "aaab"),
    ],
)
def test_the_stop_that_ends_first_wins(
    shards: Any, kind: DecoderKind, text: str, stops: list[str], trimmed: str, kept: str
) -> None:
    """Of those that end together the first in the list: the answer must not depend on the chunks."""
    shard = shards("bytelevel", kind)
    ids = list(text.encode())
    for chunks in ([ids], [[token_id] for token_id in ids], [ids[:3], [], ids[3:]]):
        for reason in (None, LENGTH):
            assert shard.text(chunks, reason=reason, stop=stops) == trimmed
            assert shard.text(chunks, reason=reason, stop=stops, keep=True) == kept


@both_kinds
def test_three_requests_stop_each_at_its_own_string(shards: Any, kind: DecoderKind) -> None:
    """One batch, three ends, three aborts asked for once, and nothing afterwards."""
    texts = {
        "My name is Robert from Neural Magic and I love working on vLLM so much!": "I love working on",
        "Red Hat is the best open source company by far across Linux, K8s, and AI.": "company by far",
        "Nick is the name of my brother in addition to my colleague from Red Hat.": "brother in",
    }
    shard = shards("bytelevel", kind)
    for keep in (False, True):
        shard.aborts.clear()
        ids = {shard.open(stop=list(texts.values()), keep=keep): text for text in texts}
        for position in range(max(map(len, texts))):
            rows = [(i, text[position].encode(), None) for i, text in ids.items() if position < len(text)]
            shard.step(*((i, list(raw), reason) for i, raw, reason in rows))
        for request_id, text in ids.items():
            before, stop, _ = text.partition(texts[text])
            assert "".join(shard.deltas[request_id]) == (before + stop if keep else before)
            assert shard.ends[request_id] == {"type": "stop", "matched": stop}
        assert sorted(shard.aborts) == sorted(ids)


@both_kinds
def test_stop_strings_wait_for_the_very_token(shards: Any, kind: DecoderKind) -> None:
    """min_new_tokens counts tokens, also in the midst of a chunk of several."""
    shard = shards("bytelevel", kind)
    ids = list(b"tes\nt\nx")
    for sizes in ([1] * 7, [7], [3, 4], [4, 3], [5, 2], [6, 1], [2, 5]):
        ends = list(itertools.accumulate(sizes))
        chunks = [ids[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        for stops in ({"stop": ["\n"]}, {"regexes": ["[\n]"]}):
            text, end = shard.run(chunks, stop=stops.get("stop", ()), regexes=stops.get("regexes", ()),
                                  min_new_tokens=5, keep=True)  # fmt: skip
            assert text == "tes\nt\n"
            assert end["type"] == "stop"
    assert shard.text([list(b"hi"), list(b"!x"), list(b"y!z")], stop=["!"], min_new_tokens=5) == "hi!xy"


@both_kinds
def test_a_stop_that_comes_about_with_the_last_flush_counts(shards: Any, kind: DecoderKind) -> None:
    """U+FFFD of an incomplete character is text like any other."""
    shard = shards("bytelevel", kind)
    text, end = shard.run([list(b"ab"), [228]], stop=["b" + BROKEN])
    assert (text, end) == ("a", {"type": "stop", "matched": "b" + BROKEN})


@both_kinds
def test_stop_tokens_and_stop_strings_together(shards: Any, kind: DecoderKind) -> None:
    """The engine says that it stopped at a token; the string came before it and is what counts."""
    shard = shards("bytelevel", kind)
    ids = list(b"abcdeZ")
    for keep, wanted in ((False, "ab"), (True, "abcd")):
        chunks = [[token_id] for token_id in ids]
        assert shard.text(chunks, reason=FinishReason.stop(ord("Z")), stop=["cd"], keep=keep) == wanted
        assert shard.run([ids], reason=FinishReason.stop(ord("Z")), stop=["cd"], keep=keep) == (
            wanted,
            {"type": "stop", "matched": "cd"},
        )


@both_kinds
@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_token_is_trimmed_and_what_was_held_comes_out(
    shards: Any, kind: DecoderKind, keep: bool
) -> None:
    """Ids 5 to 7 are said, the matched one only if it is asked for, and half a stop string is text."""
    shard = shards("bytelevel", kind)
    request_id = shard.open(stop=["END"], keep=keep)
    shard.step((request_id, list(b"x E"), None))
    shard.step((request_id, list(b"N!"), FinishReason.stop(ord("!"))))
    assert "".join(shard.deltas[request_id]) == ("x EN!" if keep else "x EN")
    assert shard.ids[request_id] == list(b"x EN!" if keep else b"x EN")
    assert shard.counts[request_id] == 5


@both_kinds
def test_a_prompt_that_ends_inside_a_character_is_not_said_again(shards: Any, kind: DecoderKind) -> None:
    """Only the character that the output completes comes out."""
    shard = shards("bytelevel", kind)
    pepper = list("🌶".encode())
    request_id = shard.open(prompt=[*b" world ", *pepper[:2]][-8:])
    shard.step((request_id, pepper[2:], None))
    shard.step((request_id, list(b" ok"), LENGTH))
    assert shard.deltas[request_id] == ["🌶", " ok"]


@both_kinds
@pytest.mark.parametrize(
    "text",
    [
        "你好世界", "😀😃😄😁", "hello 你好 world 🌍", "café résumé naïve", "こんにちは", "Привет мир",
        "مرحبا",
        "🧑‍💻👨‍👩‍👧‍👦", "a你b😀c", "ပုံပြင်လေးပြောပြပါ်", "URGENCY🌶️", "我很感谢你的热情", "A 世ab", "中" * 32,
    ],
)  # fmt: skip
def test_text_comes_out_at_every_split_of_its_bytes(shards: Any, kind: DecoderKind, text: str) -> None:
    """Any two pieces, one byte at a time, all at once: whole characters, and all of them."""
    shard = shards("bytelevel", kind)
    raw = list(text.encode())
    splits = [[raw[:cut], raw[cut:]] for cut in range(len(raw) + 1)]
    splits.append([[byte] for byte in raw])
    requests = [shard.open(prompt=list(b"prompt: ")) for _ in splits]
    for step in range(max(map(len, splits))):
        shard.step(*((r, chunks[step], None) for r, chunks in zip(requests, splits, strict=True)
                     if step < len(chunks)))  # fmt: skip
    for request_id in requests:
        assert "".join(shard.deltas[request_id]) == text
        assert not any(BROKEN in delta for delta in shard.deltas[request_id])


def _splits(length: int) -> Iterator[tuple[int, ...]]:
    """Ends of all splits of so many tokens into up to four chunks."""
    for pieces in range(1, 5):
        for cuts in itertools.combinations(range(1, length), pieces - 1):
            yield (*cuts, length)


def _naive(text: str, stops: Sequence[str], *, keep: bool) -> tuple[str, str | None]:
    """The answer to a text that has come so far: what is said of it, and what stopped it."""
    ends = [(text.find(stop) + len(stop), order, stop) for order, stop in enumerate(stops) if stop in text]
    if ends:
        end, _, stop = min(ends)
        return text[: end if keep else end - len(stop)], stop
    held = max(
        (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])),
        default=0,
    )
    return text[: len(text) - held], None


STOP_SETS = [
    ["END"],
    ["aab", "ab"],
    ["中b", "b"],
    ["E", "END", "NDE"],
    ["aaaa"],
    ["b中", "a中a", "中中"],
    ["never", "ne", "EN!"],
]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stops", STOP_SETS, ids=" ".join)
def test_every_stop_at_every_offset_over_every_split(shards: Any, stops: list[str], keep: bool) -> None:
    """Against a naive reading of the whole text so far, after every chunk, through the step in C."""
    shard = shards("bytelevel")
    texts = ["aEaN中b", "aaba中a"]
    for text, stop in itertools.product(texts, stops):
        for offset in range(len(text) + 1):
            whole = text[:offset] + stop + text[offset:]
            raw = whole.encode()
            splits = list(_splits(len(raw)))
            requests = [shard.open(stop=stops, keep=keep) for _ in splits]
            ended: set[int] = set()
            for step in range(4):
                rows = []
                for request_id, ends in zip(requests, splits, strict=True):
                    if step < len(ends) and request_id not in ended:
                        start = ends[step - 1] if step else 0
                        rows.append((request_id, list(raw[start : ends[step]]), None))
                if not rows:
                    break
                shard.step(*rows)
                for request_id, ends in zip(requests, splits, strict=True):
                    if step < len(ends) and request_id not in ended:
                        so_far = raw[: ends[step]].decode("utf-8", "ignore")
                        wanted, matched = _naive(so_far, stops, keep=keep)
                        assert "".join(shard.deltas[request_id]) == wanted, (whole, ends, step)
                        assert shard.ends.get(request_id, {}).get("matched") == matched
                        if matched is not None:
                            ended.add(request_id)
            left = [request_id for request_id in requests if request_id not in ended]
            if left:
                shard.step(*((request_id, [], LENGTH) for request_id in left))
                assert {"".join(shard.deltas[request_id]) for request_id in left} == {whole}


def _words() -> Tokenizer:
    vocabulary = {w: i for i, w in enumerate(["<s>", "</s>", "[UNK]", "hello", "world", "世界", "hi"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def _byte_tokens() -> Tokenizer:
    names = [
        "[UNK]",
        "<s>",
        "</s>",
        "hello",
        " ",
        "world",
        "😀",
        "中",
        "\n",
        *(f"<0x{b:02X}>" for b in range(256)),
    ]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="[UNK]"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@both_kinds
@pytest.mark.parametrize("spaces", [True, False])
@pytest.mark.parametrize(
    ("prompt", "chunks", "skip", "wanted"),
    [
        ([3], [[4], [5], [6]], True, [" world", " 世界", " hi"]),
        ([5], [[3], [4]], True, [" hello", " world"]),
        ([-101, 2_000_000_000, 3], [[4], [5]], True, [" world", " 世界"]),
        ([3], [[0, 1], [4], [1]], True, ["", " world", ""]),
        ([3], [[0, 1], [4], [1]], False, [" <s> </s>", " world", " </s>"]),
        ([3], [[-102, 2_000_000_000], [4]], False, ["", " world"]),  # unknown ids add nothing
    ],
)
def test_words_go_on_where_the_prompt_ended(
    shards: Any, kind: DecoderKind, prompt: Any, chunks: Any, skip: bool, wanted: Any, spaces: bool
) -> None:
    """Deltas, not only their join: what came is final."""
    shard = shards(_words(), kind)
    request_id = shard.open(prompt=prompt, skip=skip, spaces=spaces)
    for number, chunk in enumerate(chunks, 1):
        shard.step((request_id, chunk, LENGTH if number == len(chunks) else None))
    assert shard.deltas[request_id] == wanted
    assert shard.ids[request_id] == [token_id for chunk in chunks for token_id in chunk]


@both_kinds
@pytest.mark.parametrize(
    ("prompt", "chunks", "wanted"),
    [
        ([3], [[4, 249], [168], [161, 137], [5]], [" ", "", "😀", "world"]),
        ([], [[7, 249], [168], [161, 137], [4, 5]], ["中", "", "😀", " world"]),
        ([3], [[4], [237]], [" ", BROKEN]),
        ([7, 249], [[168], [161, 137], [4, 5]], ["", "😀", " world"]),
        ([3], [[8], [7], [249, 168], [161, 137]], ["\n", "中", "", "😀"]),
        ([3], [[4, 5], []], [" world", ""]),
    ],
)
def test_byte_tokens_come_out_as_whole_characters(
    shards: Any, kind: DecoderKind, prompt: Any, chunks: Any, wanted: Any
) -> None:
    """A reader sees each character once, and when it is complete."""
    shard = shards(_byte_tokens(), kind)
    request_id = shard.open(prompt=prompt)
    for number, chunk in enumerate(chunks, 1):
        shard.step((request_id, chunk, LENGTH if number == len(chunks) else None))
    assert shard.deltas[request_id] == wanted


@both_kinds
def test_requests_of_one_batch_keep_their_own_choices(shards: Any, kind: DecoderKind) -> None:
    """Skipping and trimming are each request's own, whoever shares its frames."""
    tokenizer = _words()
    shard = shards(tokenizer, kind)
    choices = list(itertools.product([False, True], repeat=2))
    requests = [shard.open(skip=skip, keep=keep) for skip, keep in choices]
    for chunk, reason in (([0, 3], None), ([4], None), ([1], FinishReason.stop(1))):
        shard.step(*((request_id, chunk, reason) for request_id in requests))
    for request_id, (skip, keep) in zip(requests, choices, strict=True):
        text = "".join(shard.deltas[request_id])
        assert shard.ids[request_id] == ([0, 3, 4, 1] if keep else [0, 3, 4])
        assert shard.counts[request_id] == 4
        assert ("<s>" in text) == (not skip)
        assert text.endswith("</s>") == (not skip and keep)
        assert text == tokenizer.decode(shard.ids[request_id], skip_special_tokens=skip)


@both_kinds
def test_stray_bytes_reach_the_client_as_they_come(shards: Any, kind: DecoderKind) -> None:
    """A model gone astray must neither go silent nor cost more and more."""
    shard = shards("bytelevel", kind)
    request_id = shard.open()
    for _ in range(256):
        shard.step((request_id, [0x80] * 4, None))
    assert sum(map(len, shard.deltas[request_id])) >= 1000
    shard.step((request_id, [], LENGTH))
    assert "".join(shard.deltas[request_id]) == BROKEN * 1024


@both_kinds
def test_a_special_stop_token_among_shown_ones(shards: Any, kind: DecoderKind) -> None:
    """Text of special tokens may hold a stop string, and may be one itself."""
    shard = shards("bytelevel", kind)
    assert shard.run([[97, 273, 98]], skip=False, stop=["<|im_end|>"]) == (
        "a",
        {"type": "stop", "matched": "<|im_end|>"},
    )
    assert shard.text([[97, 273, 98]], skip=True, stop=["<|im_end|>"]) == "ab"


def test_long_stop_strings_and_many_of_them(shards: Any) -> None:
    """Bounds that requests may reach are reached here: 32 stop strings of 4,096 characters."""
    shard = shards("bytelevel")
    stops = [chr(97 + n % 26) * (4095 - n) + "!" + str(n) for n in range(32)]
    held = stops[3][:-1]
    assert shard.text(_bytes("x", held[:2000], held[2000:], "?"), stop=stops) == "x" + held + "?"
    assert shard.run(_bytes("x", stops[3][:77], stops[3][77:]), stop=stops) == (
        "x",
        {"type": "stop", "matched": stops[3]},
    )
