"""A table that fits its terminal."""

import io

import pytest

from shmring.cli.table import Cell, Column, render, shortened
from shmring.cli.terminal import Terminal, Tone

COLUMNS = (
    Column("NAME"),
    Column("COUNT", is_number=True, rank=1),
    Column("BYTES", is_number=True, rank=2),
    Column("NOW", clipped_to=8),
)
ROWS = (
    [Cell("a.deployment.with.egress.10"), Cell("7"), Cell("1 KiB"), Cell("consumer sleeps")],
    [Cell("b"), Cell("12345"), Cell("3 B"), Cell("full", Tone.ALARM)],
)


class Tty(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_nothing_is_shortened():
    """`shmring ls | grep` must find whole names."""
    lines = render(COLUMNS, ROWS, Terminal())
    assert lines == [
        "NAME                         COUNT  BYTES  NOW",
        "a.deployment.with.egress.10      7  1 KiB  consumer sleeps",
        "b                            12345    3 B  full",
    ]


@pytest.mark.parametrize("width", range(24, 80))
def test_no_line_is_wider_than_the_terminal(width):
    """A wrapped table cannot be read."""
    lines = render(COLUMNS, ROWS, Terminal(width=width))
    assert max(len(line) for line in lines if not line.startswith("(too narrow")) <= width


def test_columns_that_matter_less_are_left_out_and_named():
    """Who does not see the bytes must see that there would be some."""
    lines = render(COLUMNS, ROWS, Terminal(width=32))
    assert lines[0].split() == ["NAME", "COUNT", "NOW"]
    assert lines[-1] == "(too narrow for: bytes)"


def test_text_is_clipped_before_names_are_shortened():
    """A name is what the next command needs; a sentence's end is not."""
    lines = render(COLUMNS, ROWS, Terminal(width=50))
    assert lines[1].startswith("a.deployment.with.egress.10 ")


def test_a_shortened_name_keeps_its_end():
    """The end tells the shards of a deployment apart."""
    assert shortened("a.deployment.egress.10", 12) == "a.d~gress.10"
    assert shortened("short", 12) == "short"


def test_colour_does_not_move_the_columns():
    """Escape sequences have no width on the screen."""
    plain = render(COLUMNS, ROWS, Terminal(width=80))
    coloured = render(COLUMNS, ROWS, Terminal(width=80, has_colour=True))
    assert coloured != plain
    assert coloured[2].replace("\x1b[1;31m", "").replace("\x1b[0m", "") == plain[2]


@pytest.mark.parametrize(
    ("stream", "environ", "has_colour"),
    [
        (Tty(), {}, True),
        (Tty(), {"NO_COLOR": ""}, True),
        (Tty(), {"NO_COLOR": "1"}, False),
        (Tty(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(stream, environ, has_colour):
    """Escape sequences in a log file, or on a terminal that asked for none, are rubbish."""
    assert Terminal.of(stream, environ).has_colour is has_colour


def test_sentences_break_at_words_on_a_terminal_only():
    """A sentence cut inside a pid is misread; one cut at all is not found by grep."""
    assert Terminal(width=24).wrapped("the consumer (pid 1234) is gone") == [
        "the consumer (pid 1234)",
        "    is gone",
    ]
    assert Terminal().wrapped("the consumer (pid 1234) is gone") == ["the consumer (pid 1234) is gone"]
