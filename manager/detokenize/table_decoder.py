"""Decodes with a table of bytes, a whole batch in one call of C.

About 20 ns a token, the same at any length of output. No tokenizer is needed any more.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from manager._detok import ffi, lib
from manager.detokenize.interface import DecoderKind, check_rows
from manager.detokenize.slots import SlotTable
from manager.errors import DetokenizeError

if TYPE_CHECKING:
    from manager._detok import CData
    from manager.detokenize.table import DecodeTable

_STATE_LENGTH = ffi.sizeof("struct detok_state")
_UNKNOWN_IDS_OFFSET = ffi.offsetof("struct detok_state", "unknown_ids")
_FIRST_OUT_LENGTH = 1 << 16

_REFUSALS = {
    -errno.ERANGE: "a slot is out of range",
    -errno.ENOENT: "a slot is not open",
    -errno.EINVAL: "counts do not add up to the number of token ids",
    -errno.ENOBUFS: "more than 4 GiB of text in one batch",
}


class TableDecoder:
    """A BatchDecoder on a DecodeTable, whose arrays it reads and never copies."""

    kind = DecoderKind.TABLE

    def __init__(self, table: DecodeTable, *, slots_max: int, reason: str) -> None:
        self.reason = reason
        self.vocab_size = table.vocab_size
        self._table = table
        self._c_table = _c_table(table)
        self._slots = SlotTable(slots_max)
        self._states = np.zeros((self._slots.capacity, _STATE_LENGTH), np.uint8)
        self._c_states = _c_states(self._states)
        # Written by decode, then copied out: the bound of a batch is some times its text.
        self._out = np.empty(_FIRST_OUT_LENGTH, np.uint8)
        self._c_finish_out = ffi.new("uint8_t[3]")

    @property
    def slots_max(self) -> int:
        """How many texts there may be at a time."""
        return self._slots.slots_max

    @property
    def c_table(self) -> CData:
        """The table as C sees it, checked; valid for as long as this decoder is."""
        return self._c_table

    def open(
        self,
        prompt_tail: npt.NDArray[np.int32],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,  # noqa: ARG002 - see BatchDecoder.open
    ) -> int:
        """See BatchDecoder.open."""
        if prompt_tail.dtype != np.int32 or prompt_tail.ndim != 1:
            raise TypeError(f"prompt_tail is not (m,) int32: {prompt_tail.dtype}, {prompt_tail.shape}")
        slot = self._slots.take()
        if self._slots.capacity > len(self._states):
            states = np.zeros((self._slots.capacity, _STATE_LENGTH), np.uint8)
            states[: len(self._states)] = self._states
            self._states, self._c_states = states, _c_states(states)
        tail = np.ascontiguousarray(prompt_tail)
        lib.detok_open(
            self._c_table,
            self._c_state(slot),
            skip_special_tokens,
            ffi.from_buffer("int32_t[]", tail),
            len(tail),
        )
        return slot

    def close(self, slot: int) -> None:
        """See BatchDecoder.close."""
        self._slots.give_back(slot)
        self._states[slot] = 0

    def decode(
        self,
        slots: npt.NDArray[np.uint32],
        counts: npt.NDArray[np.uint32],
        token_ids: npt.NDArray[np.int32],
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """See BatchDecoder.decode."""
        check_rows(slots, counts, token_ids)
        lengths = np.empty(len(slots), np.uint32)
        c_slots = ffi.from_buffer("uint32_t[]", np.ascontiguousarray(slots))
        c_counts = ffi.from_buffer("uint32_t[]", np.ascontiguousarray(counts))
        c_token_ids = ffi.from_buffer("int32_t[]", np.ascontiguousarray(token_ids))
        c_lengths = ffi.from_buffer("uint32_t[]", lengths)
        while True:
            length = lib.detok_decode(
                self._c_table,
                self._c_states,
                len(self._states),
                c_slots,
                c_counts,
                len(slots),
                c_token_ids,
                len(token_ids),
                ffi.from_buffer("uint8_t[]", self._out),
                len(self._out),
                c_lengths,
            )
            if length >= 0:
                return self._out[:length].copy(), lengths
            bound = lib.detok_decode_bound(self._c_table, c_token_ids, len(token_ids))
            if length != -errno.ENOBUFS or bound <= len(self._out):
                raise DetokenizeError(
                    f"batch refused, {_REFUSALS[length]}: rows={len(slots)}, token_ids={len(token_ids)}"
                )
            self._out = np.empty(max(bound, 2 * len(self._out)), np.uint8)

    def finish(self, slot: int) -> bytes:
        """See BatchDecoder.finish."""
        self._slots.check(slot)
        length = lib.detok_finish(self._c_state(slot), self._c_finish_out)
        return bytes(ffi.buffer(self._c_finish_out, length))

    def decode_one(self, token_id: int) -> str:
        """See BatchDecoder.decode_one."""
        return self._table.text_of(token_id).decode("utf-8", "replace")

    def decode_each(
        self, token_ids: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """See BatchDecoder.decode_each."""
        if token_ids.dtype != np.int32 or token_ids.ndim != 1:
            raise TypeError(f"token_ids is not (n,) int32: {token_ids.dtype}, {token_ids.shape}")
        c_token_ids = ffi.from_buffer("int32_t[]", np.ascontiguousarray(token_ids))
        bound = lib.detok_decode_bound(self._c_table, c_token_ids, len(token_ids))
        out = np.empty(bound, np.uint8)
        lengths = np.empty(len(token_ids), np.uint32)
        length = lib.detok_decode_each(
            self._c_table,
            c_token_ids,
            len(token_ids),
            ffi.from_buffer("uint8_t[]", out),
            bound,
            ffi.from_buffer("uint32_t[]", lengths),
        )
        if length < 0:
            raise DetokenizeError(f"batch refused, {_REFUSALS[length]}: token_ids={len(token_ids)}")
        return out[:length].copy(), lengths

    def unknown_ids(self, slot: int) -> int:
        """See BatchDecoder.unknown_ids."""
        self._slots.check(slot)
        count = self._states[slot, _UNKNOWN_IDS_OFFSET : _UNKNOWN_IDS_OFFSET + 4].view(np.uint32)
        return int(count[0])

    def _c_state(self, slot: int) -> CData:
        # of the row's own memory: a slot that was not checked cannot point elsewhere
        return ffi.from_buffer("struct detok_state *", self._states[slot])


def _c_states(states: npt.NDArray[np.uint8]) -> CData:
    return ffi.from_buffer("struct detok_state *", states)


def _c_table(table: DecodeTable) -> CData:
    """The table as C sees it; valid as long as `table` is. DetokenizeError if it is broken."""
    id_count = len(table.flags)
    if len(table.text_offsets) != id_count + 1 or (
        table.first_offsets is not None and len(table.first_offsets) != id_count + 1
    ):
        raise DetokenizeError(f"decode table has too few offsets: id_count={id_count}")
    first_text, first_offsets = ffi.NULL, ffi.NULL
    first_length = 0
    if table.first_text is not None and table.first_offsets is not None:
        first_text = ffi.from_buffer("uint8_t[]", table.first_text)
        first_offsets = ffi.from_buffer("uint32_t[]", table.first_offsets)
        first_length = len(table.first_text)
    c_table = ffi.new(
        "struct detok_table *",
        {
            "text": ffi.from_buffer("uint8_t[]", table.text),
            "text_offsets": ffi.from_buffer("uint32_t[]", table.text_offsets),
            "first_text": first_text,
            "first_offsets": first_offsets,
            "flags": ffi.from_buffer("uint8_t[]", table.flags),
            "id_count": id_count,
            "strip_byte": table.strip_byte,
            "strip_count": table.strip_count,
            "swap_from_length": len(table.swap_from),
            "swap_to_length": len(table.swap_to),
            "swap_from": list(table.swap_from),
            "swap_to": list(table.swap_to),
        },
    )
    if lib.detok_table_check(c_table, len(table.text), first_length) != 0:
        raise DetokenizeError(f"decode table contradicts itself: id_count={id_count}")
    return c_table
