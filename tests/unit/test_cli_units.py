"""Figures as people read them."""

import pytest

from shmring.cli.units import escaped, format_bar, format_bytes, format_count, format_duration, format_ratio


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (900, "900 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 10, "64 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (3 << 30, "3 GiB"),
        (1 << 40, "1 TiB"),
        (2**64 - 1, "16 EiB"),
    ],
)
def test_bytes_are_told_in_binary_units(count, text):
    """A capacity of 65536 must be recognised as the 64 KiB that somebody configured."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (950, "950"), (999.7, "1k"), (1234, "1.2k"), (12_345, "12k"), (3_400_000, "3.4M")],
)
def test_counts_stay_short(count, text):
    """A count of a week's records must not push the other columns off the screen."""
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (850, "850 ns"),
        (1024, "1.02 us"),
        (16_384, "16.4 us"),
        (131_072, "131 us"),
        (1_500_000, "1.5 ms"),
        (3_200_000_000, "3.2 s"),
        (59_900_000_000, "59.9 s"),
        (59_970_000_000, "1 min"),
        (303_000_000_000, "5 min 3 s"),
        (3_600_000_000_000, "1 h"),
        (12_300_000_000_000, "3 h 25 min"),
        (187_200_000_000_000, "2 d 4 h"),
    ],
)
def test_durations_have_a_unit_that_fits(ns, text):
    """ "Since when" is the first question at night; nine digits of nanoseconds do not answer it."""
    assert format_duration(ns) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(0, "0%"), (0.0001, "<1%"), (0.5, "50%"), (0.9999, "99%"), (1, "100%")]
)
def test_a_ratio_is_nothing_or_all_only_if_it_is(ratio, text):
    """A ring with one record left must not look empty, nor one with room look full."""
    assert format_ratio(ratio) == text


@pytest.mark.parametrize(
    ("ratio", "bar"),
    [
        (0, "[.....]"),
        (0.001, "[#....]"),
        (0.5, "[##...]"),
        (0.999, "[####.]"),
        (1, "[#####]"),
        (7, "[#####]"),
    ],
)
def test_a_bar_is_empty_or_whole_only_if_the_ring_is(ratio, bar):
    """As with the ratio; and a damaged ring must not draw beyond the bar."""
    assert format_bar(ratio, 5) == bar


def test_control_characters_never_reach_the_terminal():
    """Anybody may name a file in shared memory; listing it must not clear the screen or retitle it."""
    assert escaped("a\x1b[2Jb\udcffc\n") == "a\\x1b[2Jb\\udcffc\\n"
