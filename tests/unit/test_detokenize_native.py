"""The decoder core in C, called directly: what it writes, where, and what it refuses."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from manager._detok import ffi, lib
from manager.detokenize import PROMPT_TAIL_MAX

# id 0 "a", 1 U+4E2D, 2 a broken token of five bytes, 3 half a character, 4 special, 5 a hole
TEXTS = [b"a", "中".encode(), b"\xff\xff\xff\xff\xe4", b"\xe4\xb8", b"<s>", b""]
FLAGS = [5, 5, 1, 1, 7, 0]
SENTINEL = 0xA5


class _Core:
    """A table, some open states, and a buffer with a margin that nothing may touch."""

    def __init__(self, *, states=2, open_states=2, strip_count=0):
        self.text = np.frombuffer(b"".join(TEXTS), np.uint8)
        self.offsets = np.cumsum([0, *map(len, TEXTS)], dtype=np.uint32)
        self.flags = np.array(FLAGS, np.uint8)
        self.table = ffi.new(
            "struct detok_table *",
            {
                "text": ffi.from_buffer("uint8_t[]", self.text),
                "text_offsets": ffi.from_buffer("uint32_t[]", self.offsets),
                "flags": ffi.from_buffer("uint8_t[]", self.flags),
                "id_count": len(TEXTS),
                "strip_byte": ord("a"),
                "strip_count": strip_count,
            },
        )
        assert lib.detok_table_check(self.table, len(self.text), 0) == 0
        self.states = ffi.new("struct detok_state[]", states)
        self.state_count = states
        for state in range(open_states):
            lib.detok_open(self.table, self.states + state, False, ffi.NULL, 0)

    def bound(self, token_ids):
        return lib.detok_decode_bound(self.table, ffi.new("int32_t[]", token_ids), len(token_ids))

    def decode(self, slots, counts, token_ids, capacity):
        """(result, the text, the lengths); fails if a byte beyond the capacity was written."""
        out = np.full(capacity + 64, SENTINEL, np.uint8)
        lengths = ffi.new("uint32_t[]", len(slots) + 1)
        result = lib.detok_decode(
            self.table,
            self.states,
            self.state_count,
            ffi.new("uint32_t[]", slots),
            ffi.new("uint32_t[]", counts),
            len(slots),
            ffi.new("int32_t[]", token_ids),
            len(token_ids),
            ffi.from_buffer("uint8_t[]", out),
            capacity,
            lengths,
        )
        assert (out[capacity:] == SENTINEL).all()
        return result, out[: max(result, 0)].tobytes(), [lengths[row] for row in range(len(slots))]


def test_rows_lie_back_to_back_with_their_lengths():
    """A row would be sent to the client of the row before it."""
    core = _Core()
    result, text, lengths = core.decode([0, 1, 0], [2, 1, 1], [0, 1, 4, 0], 100)
    assert (result, text.decode(), lengths) == (8, "a中<s>a", [4, 3, 1])


@pytest.mark.parametrize("token_id", range(-1, 7))
@pytest.mark.parametrize("before", [[], [3], [2]])
def test_the_bound_is_enough_whatever_was_pending(token_id, before):
    """A buffer of the promised size would be overrun."""
    core = _Core()
    core.decode([0], [len(before)], before, 100)
    result, _, _ = core.decode([0], [1], [token_id], core.bound([token_id]))
    assert 0 <= result <= core.bound([token_id])


def test_the_bound_is_reached_by_the_worst_token():
    """A bound that is never needed would waste memory by the batch."""
    core = _Core()
    core.decode([0], [1], [3], 100)
    result, _, _ = core.decode([0], [1], [2], core.bound([2]))
    assert result == 3 + 4 * 3  # the pending character, four bad bytes; the fifth is held


def test_the_bound_counts_the_text_of_a_first_token():
    """A first token that is longer than elsewhere would be written past the buffer."""
    core = _Core()
    first = np.frombuffer(b"b" * 40, np.uint8)
    first_offsets = np.array([0, *[40] * len(TEXTS)], np.uint32)
    core.table.first_text = ffi.from_buffer("uint8_t[]", first)
    core.table.first_offsets = ffi.from_buffer("uint32_t[]", first_offsets)
    assert lib.detok_table_check(core.table, len(core.text), len(first)) == 0
    assert core.decode([0], [2], [0, 0], core.bound([0, 0]))[1] == b"b" * 40 + b"a"


@pytest.mark.parametrize(
    ("slots", "counts", "token_ids", "capacity", "refusal"),
    [
        ([2], [1], [0], 100, errno.ERANGE),
        ([2**32 - 1], [1], [0], 100, errno.ERANGE),
        ([0, 1], [1, 1], [0, 0], 100, errno.ENOENT),
        ([0], [2], [0], 100, errno.EINVAL),
        ([0], [0], [0], 100, errno.EINVAL),
        ([0, 0], [2**32 - 1, 2], [0], 100, errno.EINVAL),  # the sum is 1 in 32 bits
        ([], [], [0], 100, errno.EINVAL),
        ([0], [1], [1], 5, errno.ENOBUFS),
    ],
)
def test_a_refused_batch_writes_nothing_and_changes_no_state(slots, counts, token_ids, capacity, refusal):
    """A caller that mends its arguments would find half of the batch gone."""
    core = _Core(open_states=1)
    core.decode([0], [1], [3], 100)
    before = bytes(ffi.buffer(core.states))
    result, _, lengths = core.decode(slots, counts, token_ids, capacity)
    assert result == -refusal
    assert bytes(ffi.buffer(core.states)) == before
    assert not any(lengths)


def test_the_strip_stops_at_the_first_other_character():
    """Letters inside the text would vanish."""
    core = _Core(strip_count=2)
    assert core.decode([0], [5], [0, 0, 0, 1, 0], 100)[1].decode() == "a中a"
    assert core.decode([1], [3], [0, 1, 0], 100)[1].decode() == "中a"


def test_the_count_of_unknown_ids_stays_at_its_maximum():
    """A count that begins again would tell of one bad id instead of billions."""
    core = _Core()
    core.states[0].unknown_ids = 2**32 - 2
    core.decode([0], [3], [-1, 5, 6], 100)
    assert core.states[0].unknown_ids == 2**32 - 1


def test_finish_writes_one_sign_and_forgets():
    """U+FFFD would come out once for every flush."""
    core = _Core()
    core.decode([0], [1], [3], 100)
    out = ffi.new("uint8_t[3]")
    assert lib.detok_finish(core.states, out) == 3
    assert bytes(ffi.buffer(out)).decode() == "\N{REPLACEMENT CHARACTER}"
    assert lib.detok_finish(core.states, out) == 0


def test_a_state_of_zeros_is_a_free_slot():
    """A table grown with zeros would have slots open that nobody opened."""
    core = _Core(open_states=0)
    assert core.decode([0], [0], [], 0)[0] == -errno.ENOENT


def test_a_longer_prompt_tail_is_looked_at_from_its_end():
    """Opening would read all of a prompt of 100,000 ids."""
    core = _Core()
    tail = [3] * PROMPT_TAIL_MAX + [0, 1, 0]
    lib.detok_open(core.table, core.states, False, ffi.new("int32_t[]", tail), len(tail))
    assert core.states[0].pending_length == 0
    lib.detok_open(core.table, core.states, False, ffi.new("int32_t[]", [0, 3]), 2)
    assert core.states[0].pending_length == 2


def test_the_states_of_python_and_c_have_one_size():
    """Python keeps them in an array of rows."""
    assert ffi.sizeof("struct detok_state") == 12
