"""Stop regexes in text that comes in pieces: found, reported, and cut off only if they are literal."""

from __future__ import annotations

import random
import re

import pytest

from manager.errors import ValidationError
from manager.stop import REGEX_REACH_MAX, StopMatcher

END = "E.D"


def _run(matcher, pieces, *, armed=True):
    """(text, matched) of pieces that come one by one, flushed at the end."""
    text, matched = b"", None
    for piece in pieces:
        step = matcher.push(piece.encode(), armed=armed)
        step.text.decode()
        text += step.text
        matched = step.matched if matched is None else matched
    return (text + matcher.flush()).decode(), matched


@pytest.mark.parametrize("keep", [False, True])
def test_what_a_regex_matched_stays_in_the_text(keep):
    """Nobody wrote it down, so nobody expects it gone; the reference keeps it."""
    assert _run(StopMatcher([], keep=keep, regexes=[END]), ["x E", "A", "D"]) == ("x EAD", END)


@pytest.mark.parametrize(("keep", "wanted"), [(False, "x "), (True, "x E.D")])
def test_a_match_that_is_the_pattern_itself_is_trimmed_like_a_string(keep, wanted):
    """For a pattern without any magic the two kinds of stops are one."""
    matcher = StopMatcher([], keep=keep, regexes=[END])
    assert _run(matcher, ["x E", ".", "Drest"]) == (wanted, END)


def test_only_what_may_become_the_pattern_is_held_back():
    """Text before a match is not late because a regex might yet match it."""
    matcher = StopMatcher([], keep=False, regexes=[r"\d{3}"])
    assert [matcher.push(piece).text for piece in (b"a1", b"2", b"b")] == [b"a1", b"2", b"b"]
    assert StopMatcher([], keep=False, regexes=[END]).push(b"a E").text == b"a "


def test_nothing_comes_behind_a_match():
    """Text behind the end would be shown, or not, by the chance of a chunk's border."""
    assert _run(StopMatcher([], keep=True, regexes=[r"\d\d"]), ["a 12 and", " 34"]) == ("a 12", r"\d\d")


@pytest.mark.parametrize(
    ("stops", "regexes", "text", "wanted"),
    [
        (["c"], ["ab"], "xabc", ("x", "ab")),
        (["b"], ["abc"], "xabc", ("xa", "b")),
        (["ab"], ["[a]b"], "xab", ("x", "ab")),  # together: the strings first
        ([], ["cd", "b."], "abcd", ("abc", "b.")),
    ],
)
def test_what_ends_first_wins(stops, regexes, text, wanted):
    """Two stops in one chunk: the answer must not depend on how the text was cut."""
    assert _run(StopMatcher(stops, keep=False, regexes=regexes), [text]) == wanted


def test_a_match_may_reach_over_any_number_of_pieces():
    """A regex cut by chunks is found, as far back as it can reach."""
    text = "some text (123-456) and more"
    for seed in range(300):
        rng = random.Random(seed)
        pieces, start = [], 0
        while start < len(text):
            pieces.append(text[start : start + rng.randint(1, 5)])
            start += len(pieces[-1])
        matcher = StopMatcher([], keep=True, regexes=[r"\(\d{3}-\d{3}\)"])
        assert _run(matcher, pieces) == ("some text (123-456)", r"\(\d{3}-\d{3}\)")


def test_old_matches_do_not_stop_a_text_that_had_to_go_on():
    """min_new_tokens: what was passed over is passed over for good, and what it began is not."""
    matcher = StopMatcher([], keep=True, regexes=[r"\d\d"])
    assert matcher.push(b"12 ab 3", armed=False).matched is None
    assert matcher.push(b" 4").matched is None
    matcher = StopMatcher([], keep=True, regexes=[r"\d\d"])
    assert matcher.push(b"12 ab 3", armed=False).matched is None
    step = matcher.push(b"4!")
    assert (step.text, step.matched) == (b"4", r"\d\d")


def test_the_beginning_of_a_text_is_its_beginning_and_not_that_of_a_piece():
    """A pattern for the first line would match in the middle of any."""
    assert _run(StopMatcher([], keep=True, regexes=["^b"]), ["a", "b", "b"]) == ("abb", None)
    assert _run(StopMatcher([], keep=True, regexes=["^b"]), ["b", "c"]) == ("b", "^b")
    assert _run(StopMatcher([], keep=True, regexes=["(?m)^b"]), ["a\n", "b", "c"]) == ("a\nb", "(?m)^b")
    assert _run(StopMatcher([], keep=True, regexes=[r"\bb"]), ["a", "b", " b"]) == ("ab b", r"\bb")


def test_a_regex_without_an_end_is_searched_for_in_a_bounded_tail():
    """An answer of any length must cost the same for each of its tokens."""
    matcher = StopMatcher([], keep=True, regexes=["a.*b"])
    assert _run(matcher, ["a", "x" * (REGEX_REACH_MAX - 3), "b"])[1] == "a.*b"
    matcher = StopMatcher([], keep=True, regexes=["a.*b"])
    assert _run(matcher, ["a", *["x"] * (REGEX_REACH_MAX + 1), "b"])[1] is None
    assert len(matcher._regexes._tail) <= REGEX_REACH_MAX + 1


def test_a_pattern_that_is_not_admitted_is_refused():
    """It could keep the worker busy for ever, with every other request waiting."""
    with pytest.raises(ValidationError):
        StopMatcher([], keep=False, regexes=["(a+)+b"])


@pytest.mark.parametrize("regex", [r"\d{2}", "[ab]c", "x?y", r"[.!?]\s", "世界.", "(?i)end"])
def test_fed_character_by_character_the_text_ends_where_the_first_match_ends(regex):
    """A naive reading: grow the text by one character until the pattern is found in it."""
    alphabet = "aabbcxy12 .!世界eEnNdD"
    for seed in range(200):
        rng = random.Random(seed)
        text = "".join(rng.choices(alphabet, k=40))
        wanted = next(
            ((text[:end], regex) for end in range(41) if re.search(regex, text[:end])), (text, None)
        )
        assert _run(StopMatcher([], keep=True, regexes=[regex]), text) == wanted
