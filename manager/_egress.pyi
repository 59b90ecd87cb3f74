from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmring import Producer

class Dealer:
    def __new__(
        cls,
        producers: tuple[Producer, ...],
        addresses: tuple[int, ...],
        fingerprint: int,
        type: int,
        flags: int,
        /,
    ) -> Dealer: ...
    def deal(
        self,
        request_ids: NDArray[np.uint64],
        token_counts: NDArray[np.uint32],
        token_ids: NDArray[np.int32],
        finish_codes: NDArray[np.uint8] | None,
        finish_values: NDArray[np.int64] | None,
        /,
    ) -> list[int] | None: ...

class RunningCore:
    def __new__(
        cls, dealer: Dealer, closes_up: bool, convert: Callable[[Any], NDArray[np.int32]], /
    ) -> RunningCore: ...
    def __len__(self) -> int: ...
    def add(self, request_id: int, /) -> int: ...
    def extend(self, request_ids: NDArray[np.uint64], /) -> None: ...
    def row_of(self, request_id: int, /) -> int | None: ...
    def remove(self, request_id: int, /) -> int | None: ...
    def remove_rows(self, rows: NDArray[np.uint32], /) -> None: ...
    def clear(self) -> None: ...
    def request_ids(self) -> NDArray[np.uint64]: ...
    def rows_of(self, shard: int, /) -> NDArray[np.uint32]: ...
    def step(
        self, token_ids: object, token_counts: NDArray[np.uint32] | None, finished: list[Any], /
    ) -> list[int] | None: ...
