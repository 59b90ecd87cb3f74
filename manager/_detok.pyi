# A C value or pointer; opaque to Python.
class CData: ...

class _Ffi:
    NULL: CData
    def new(self, cdecl: str, init: object = ..., /) -> CData: ...
    def from_buffer(self, cdecl: str, python_buffer: object, require_writable: bool = ..., /) -> CData: ...
    def cast(self, cdecl: str, source: object, /) -> CData: ...
    def buffer(self, cdata: CData, size: int = ..., /) -> bytes: ...
    def sizeof(self, cdecl: str, /) -> int: ...
    def offsetof(self, cdecl: str, field: str, /) -> int: ...

class _Lib:
    DETOK_PROMPT_TAIL_MAX: int
    DETOK_ID_KNOWN: int
    DETOK_ID_SPECIAL: int
    DETOK_ID_WHOLE: int
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
    def detok_finish(self, state: CData, out: CData, /) -> int: ...

ffi: _Ffi
lib: _Lib
