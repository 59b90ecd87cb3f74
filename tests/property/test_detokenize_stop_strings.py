"""The stop matcher against a model that looks at the whole text after each byte."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from manager.stop import StopMatcher

# few letters, so that stop strings overlap; bytes in common, so that prefixes end inside
LETTERS = st.text("ab終緑𝄞", max_size=24)
STOPS = st.lists(st.text("ab終緑𝄞", min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.tuples(st.text("ab終緑𝄞", max_size=6), st.booleans()), max_size=8)


def _first_stop(stops: list[str], pieces: list[tuple[str, bool]]) -> tuple[int, int, str] | None:
    """(start, end, stop) of the first to end in an armed piece, in characters of the text."""
    text = "".join(piece for piece, _ in pieces)
    end = 0
    for piece, armed in pieces:
        for _ in piece:
            end += 1
            for stop in stops:
                if armed and text[:end].endswith(stop):
                    return end - len(stop), end, stop
    return None


def _longest_beginning_at_the_end(text: str, stops: list[str]) -> str:
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max((text[-n:] for n in range(1, len(text) + 1) if text[-n:] in beginnings), key=len, default="")


@settings(deadline=None)
@given(STOPS, PIECES, st.booleans())
@example(["aab", "ab"], [("a", True), ("aab", True)], False)
@example(["ab", "abb"], [("ab", False), ("b", True)], True)
def test_the_text_ends_at_the_first_stop_string_whatever_the_pieces(stops, pieces, keep):
    """Where a text stops would depend on how many tokens came in a step."""
    matcher = StopMatcher(stops, keep=keep)
    found = _first_stop(stops, pieces)
    text = "".join(piece for piece, _ in pieces)
    wanted = text if found is None else text[: found[1] if keep else found[0]]

    released, matches = b"", []
    for piece, armed in pieces:
        step = matcher.push(piece.encode(), armed=armed)
        step.text.decode()  # whole characters only
        released += step.text
        assert wanted.encode().startswith(released)
        matches += [step.matched] if step.matched is not None else []
    released += matcher.flush()
    assert released.decode() == wanted
    assert matches == ([found[2]] if found else [])


@settings(deadline=None)
@given(STOPS, PIECES)
def test_no_more_is_held_than_may_become_a_stop_string(stops, pieces):
    """Text would come later than it has to."""
    matcher = StopMatcher(stops, keep=False)
    text, released = "", b""
    for piece, _ in pieces:
        text += piece
        step = matcher.push(piece.encode(), armed=False)
        released += step.text
        held = _longest_beginning_at_the_end(text, stops).encode()
        assert step.held_length == len(held)
        assert released + held == text.encode()
