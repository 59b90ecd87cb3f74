from typing import Any

# A C value, struct or pointer.
class CData:
    def __getattr__(self, name: str, /) -> Any: ...
    def __setattr__(self, name: str, value: object, /) -> None: ...
    def __getitem__(self, index: int, /) -> Any: ...
    def __add__(self, count: int, /) -> CData: ...

class _Ffi:
    NULL: CData
    def new(self, cdecl: str, init: object = ..., /) -> CData: ...
    def from_buffer(self, cdecl: str, python_buffer: object, require_writable: bool = ..., /) -> CData: ...
    def cast(self, cdecl: str, source: object, /) -> CData: ...
    def buffer(self, cdata: CData, size: int = ..., /) -> bytes: ...
    def unpack(self, cdata: CData, length: int, /) -> list[int]: ...
    def sizeof(self, cdecl: str, /) -> int: ...
    def offsetof(self, cdecl: str, field: str, /) -> int: ...

class _Lib:
    DETOK_PROMPT_TAIL_MAX: int
    DETOK_ID_KNOWN: int
    DETOK_ID_SPECIAL: int
    DETOK_ID_WHOLE: int
    DETOK_NO_STOP: int
    DETOK_FINISH_NONE: int
    DETOK_FINISH_STOP: int
    DETOK_FINISH_STOP_TOKEN: int
    DETOK_FINISH_LENGTH: int
    DETOK_FINISH_ABORT: int
    DETOK_FINISH_DETAILS: int
    def detok_find_whole(self, text: CData, offsets: CData, id_count: int, whole: CData, /) -> None: ...
    def detok_table_check(self, table: CData, text_length: int, first_text_length: int, /) -> int: ...
    def detok_open(
        self, table: CData, state: CData, skip_special: bool, prompt_tail: CData, prompt_tail_count: int, /
    ) -> None: ...
    def detok_decode_bound(self, table: CData, token_ids: CData, token_count: int, /) -> int: ...
    def detok_decode(
        self,
        table: CData,
        states: CData,
        state_count: int,
        slots: CData,
        counts: CData,
        row_count: int,
        token_ids: CData,
        token_count: int,
        out: CData,
        capacity: int,
        lengths: CData,
        /,
    ) -> int: ...
    def detok_decode_each(
        self,
        table: CData,
        token_ids: CData,
        token_count: int,
        out: CData,
        capacity: int,
        lengths: CData,
        /,
    ) -> int: ...
    def detok_finish(self, state: CData, out: CData, /) -> int: ...
    def detok_stops_build(self, stops: CData, /) -> int: ...
    def detok_stops_scan(
        self, stops: CData, node: int, at: CData, end: CData, armed: bool, found: CData, /
    ) -> int: ...
    def detok_stops_held(self, stops: CData, node: int, length: CData, /) -> CData: ...
    def detok_request_open(
        self,
        table: CData,
        requests: CData,
        request_id: int,
        min_new_tokens: int,
        skip_special: bool,
        no_stop_trim: bool,
        stops: CData,
        prompt_tail: CData,
        prompt_tail_count: int,
        /,
    ) -> int: ...
    def detok_request_close(self, requests: CData, request_id: int, /) -> int: ...
    def detok_request_is_open(self, requests: CData, request_id: int, /) -> int: ...
    def detok_requests_move(self, requests: CData, to: CData, /) -> int: ...
    def detok_batch_read(self, batch: CData, payload: CData, length: int, fingerprint: int, /) -> int: ...
    def detok_step_look(
        self, table: CData, requests: CData, batch: CData, rows: CData, report: CData, /
    ) -> int: ...
    def detok_step_write(
        self,
        table: CData,
        requests: CData,
        batch: CData,
        rows: CData,
        cuts: CData,
        report: CData,
        fingerprint: int,
        out: CData,
        capacity: int,
        /,
    ) -> int: ...

ffi: _Ffi
lib: _Lib
