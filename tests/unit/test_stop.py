"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

import pytest

from manager.errors import ValidationError
from manager.stop import StopMatcher, StopStep, trim_at_stop


def _run(stops: list[str], chunks: list[str], *, keep: bool = False) -> tuple[list[str], str | None]:
    """What each chunk released, and what the end released; the stop string that was found."""
    matcher = StopMatcher(stops, keep=keep)
    matched = None
    released = []
    for chunk in chunks:
        step = matcher.push(chunk.encode())
        released.append(step.text.decode())
        matched = matched or step.matched
    released.append(matcher.flush().decode())
    return released, matched


@pytest.mark.parametrize("keep", [False, True], ids=["trimmed", "kept"])
@pytest.mark.parametrize(
    ("stop", "chunks", "trimmed", "kept"),
    [
        pytest.param("END", ["答 ", "E", "", "N", "Dignored"], "答 ", "答 END", id="split"),
        pytest.param("END", ["hi E", "X ", "EN", "Drest"], "hi EX ", "hi EX END", id="failed prefix"),
        pytest.param("終わり", ["先 ", "終", "わ", "り後"], "先 ", "先 終わり", id="wide characters"),
        pytest.param("END", ["x E", "N", ""], "x EN", "x EN", id="prefix at the end"),
        pytest.param("<|end|>", ["\n<|", "end", "|>tail"], "\n", "\n<|end|>", id="text of a special token"),
        pytest.param("E.D", ["x E", "A", "D"], "x EAD", "x EAD", id="a dot is a dot"),
        pytest.param("E.D", ["x E", ".", "Drest"], "x ", "x E.D", id="literal dot"),
        pytest.param("DEFGHIJ", ["ABC", "DEF", "G", "HI", "J"], "ABC", "ABCDEFGHIJ", id="over five chunks"),
        pytest.param("\n", ["Why", "?\n"], "Why?", "Why?\n", id="text before it in the last chunk"),
        pytest.param("STOP", ["x ", "STOP y STOP z"], "x ", "x STOP", id="twice in a chunk"),
        pytest.param("five", ["four, ", "fi", "ve, six"], "four, ", "four, five", id="text after it"),
    ],
)
def test_a_stop_string_is_found_however_it_is_cut(stop, chunks, trimmed, kept, keep):
    """A client would see half of a stop string, or text behind it, and could not take it back."""
    expected = kept if keep else trimmed
    released, _ = _run([stop], chunks, keep=keep)
    assert "".join(released) == expected
    for count in range(len(released)):
        assert expected.startswith("".join(released[:count]))


@pytest.mark.parametrize(
    ("before", "delta", "stops", "matched", "trimmed", "kept"),
    [
        (" The user", " is a", ["a", "is"], "is", " The user ", " The user is"),
        (" The user", " is a", ["is", "a"], "is", " The user ", " The user is"),
        ("", "abc", ["abc", "b"], "b", "a", "ab"),
        ("", "ab", ["ab", "b"], "ab", "", "ab"),
        ("", "ab", ["b", "ab"], "b", "a", "ab"),
        ("hello world", ".", ["."], ".", "hello world", "hello world."),
        ("", "abxbcd", ["bcd", "xb"], "xb", "ab", "abxb"),
        ("", "ab", ["ab", "ab"], "ab", "", "ab"),
    ],
)
def test_the_stop_string_that_ends_first_counts_then_list_order(
    *, before, delta, stops, matched, trimmed, kept
):
    """Two clients with the same stops in another order would get different texts."""
    assert _run(stops, [before, delta])[1] == matched
    assert "".join(_run(stops, [before, delta])[0]) == trimmed
    assert "".join(_run(stops, [before, delta], keep=True)[0]) == kept


def test_text_that_cannot_become_a_stop_string_is_not_held():
    """A window as long as the longest stop string makes the first words come late."""
    stops = ["x" * 40, "</answer>"]
    chunks = list("Hello, world. This is fine.")
    assert _run(stops, chunks)[0] == [*chunks, ""]


def test_only_the_longest_end_that_begins_a_stop_string_is_held():
    """More would be late, less could not be taken back."""
    matcher = StopMatcher(["ababc", "bad"], keep=False)
    steps = [matcher.push(piece.encode()) for piece in ("xab", "ab", "a", "d")]
    assert [(step.text, step.held_length) for step in steps] == [(b"x", 2), (b"", 4), (b"ab", 3), (b"a", 0)]
    assert b"".join(step.text for step in steps) == b"xaba"
    assert steps[-1].matched == "bad"


def test_the_match_is_reported_once_and_all_after_it_is_swallowed():
    """Text behind the stop string would be flushed at the end of the request."""
    matcher = StopMatcher(["five"], keep=False)
    assert matcher.push(b"four, five, six").matched == "five"
    assert matcher.push(b" seven, fi") == StopStep(b"", None, 0)
    assert matcher.push(b"five").matched is None
    assert matcher.flush() == b""


def test_an_unarmed_match_is_passed_over_and_its_text_sent():
    """min_new_tokens would be ignored by stop strings."""
    matcher = StopMatcher(["\n"], keep=False)
    released = [matcher.push(piece, armed=False).text for piece in (b"t", b"e", b"s", b"\n", b"t")]
    assert released == [b"t", b"e", b"s", b"\n", b"t"]
    step = matcher.push(b"\nx")
    assert (step.text, step.matched) == (b"", "\n")


def test_an_unarmed_beginning_is_held_and_counts_when_it_ends_armed():
    """A stop string that ends after min_new_tokens would be streamed in part."""
    matcher = StopMatcher(["STOP"], keep=False)
    first = matcher.push(b"x ST", armed=False)
    assert (first.text, first.held_length) == (b"x ", 2)
    second = matcher.push(b"OP")
    assert (second.text, second.matched) == (b"", "STOP")


def test_an_unarmed_match_that_may_become_a_longer_one_is_held():
    """ "abc" would lose its first half to the passed-over "ab"."""
    matcher = StopMatcher(["ab", "abc"], keep=False)
    assert matcher.push(b"ab", armed=False).held_length == 2
    step = matcher.push(b"c")
    assert (step.text, step.matched) == (b"", "abc")


def test_flush_gives_back_what_was_held_and_starts_anew():
    """An answer cut at its length limit would lose its last letters."""
    matcher = StopMatcher(["END"], keep=False)
    matcher.push(b"x EN")
    assert matcher.flush() == b"EN"
    assert matcher.push(b"D").text == b"D"


def test_no_stop_strings_hold_nothing():
    """Most requests have none and pay nothing."""
    assert _run([], ["a", "", "終"]) == (["a", "", "終", ""], None)


@pytest.mark.parametrize("stop", ["", "a\ud800"], ids=["empty", "lone surrogate"])
def test_a_stop_string_that_is_no_text_is_refused(stop):
    """An empty one would match before the first letter."""
    with pytest.raises(ValidationError) as caught:
        StopMatcher(["fine", stop], keep=False)
    assert isinstance(caught.value, ValueError)
    assert caught.value.field == "stop"


def test_overlapping_prefixes_do_not_make_it_slow():
    """A stop string of one letter repeated would cost the square of the text's length."""
    matcher = StopMatcher(["a" * 1000 + "b"], keep=False)
    assert matcher.push(b"a" * 200_000).held_length == 1000
    assert matcher.push(b"b").matched == "a" * 1000 + "b"


@pytest.mark.parametrize(
    ("text", "matched", "keep", "expected"),
    [
        (" 1, 2, 3", "3", False, " 1, 2, "),
        (" 1, 2, 3", "3", True, " 1, 2, 3"),
        ("abc", "", False, "abc"),
        ("abc", "x", True, "abc"),
        ("a STOP b STOP", "STOP", False, "a "),
        ("a STOP b STOP", "STOP", True, "a STOP"),
        ("answerENDtail", "END", False, "answer"),
        ("answerENDtail", "END", True, "answerEND"),
        ("ans\n\nQuestion: A", "Question", False, "ans\n\n"),
        ("ans\n\nQuestion: A", "Question", True, "ans\n\nQuestion"),
        ("先 終わり後", "終わり", False, "先 "),
    ],
)
def test_a_match_reported_by_the_scheduler_is_cut_at_its_first_place(text, matched, keep, expected):
    """A chunk of several tokens would keep the text behind its stop string."""
    assert trim_at_stop(text.encode(), matched, keep) == expected.encode()
