"""What callers give for a column, as an array of exactly its type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from numpy.typing import NDArray


def column(name: str, values: npt.ArrayLike, dtype: type[Any]) -> NDArray[Any]:
    """`values` as a C-contiguous (n,) array of `dtype`; the very array if it is one already."""
    array = np.asarray(values)
    if array.dtype.kind in "fO" and isinstance(values, (list, tuple)):
        array = _of_ints(name, cast("Sequence[object]", values), array, dtype)
    if array.ndim != 1:
        raise ValueError(f"column is not flat: column={name}, shape={array.shape}")
    if array.dtype != dtype:
        if array.size and array.dtype.kind not in "iu":
            raise ValueError(f"column holds no integers: column={name}, dtype={array.dtype}")
        if array.size and (int(array.min()) < np.iinfo(dtype).min or int(array.max()) > np.iinfo(dtype).max):
            raise ValueError(
                f"column has a value that does not fit: column={name}, dtype={np.dtype(dtype).name}, "
                f"min={array.min()}, max={array.max()}"
            )
        array = array.astype(dtype)
    return np.ascontiguousarray(array)


def _of_ints(name: str, values: Sequence[object], made: NDArray[Any], dtype: type[Any]) -> NDArray[Any]:
    """What numpy `made` of a list, unless that is of ints alone: it makes floats of some beyond 2**63."""
    ints = [value for value in values if type(value) is int]
    if not ints or len(ints) < len(values):
        return made
    if min(ints) < np.iinfo(dtype).min or max(ints) > np.iinfo(dtype).max:
        raise ValueError(
            f"column has a value that does not fit: column={name}, dtype={np.dtype(dtype).name}, "
            f"min={min(ints)}, max={max(ints)}"
        )
    return np.array(ints, dtype)
