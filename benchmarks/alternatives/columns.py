"""Ways of making numpy views of a frame's five columns: what `Frame.columns` does, and what lost.

python benchmarks/alternatives/columns.py
"""

from __future__ import annotations

import sys
import timeit
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from ways import STEP, make_step

import shmring

ROWS = 256
PLACES = [(56, ROWS), (2104, ROWS), (3128, ROWS), (4152, ROWS), (4408, ROWS)]


def main() -> None:
    with (
        shmring.create("bench-columns", 1 << 16) as ring,
        ring.producer() as producer,
        ring.consumer() as consumer,
    ):
        STEP.push(producer, ROWS, *make_step(ROWS))
        (record,) = consumer.drain(1)
        view, dtypes = record.payload, STEP.dtypes
        fields = np.dtype(
            {
                "names": list(STEP.names),
                "formats": [(dtype, ROWS) for dtype in dtypes],
                "offsets": [offset for offset, _ in PLACES],
                "itemsize": len(record),
            }
        )
        ways = {
            "Frame.columns, every length checked": lambda: STEP.read(record).columns(),
            "np.frombuffer a column": lambda: [
                np.frombuffer(view, dtype, count, at)
                for dtype, (at, count) in zip(dtypes, PLACES, strict=True)
            ],
            "np.ndarray a column": lambda: [
                np.ndarray((count,), dtype, view, at)
                for dtype, (at, count) in zip(dtypes, PLACES, strict=True)
            ],
            "one np.frombuffer, cut and cast": lambda: _cut(np.frombuffer(view, np.uint8), dtypes),
            "one structured scalar, a field a column": lambda: [
                np.frombuffer(view, fields, 1)[0][name] for name in STEP.names
            ],
        }
        for name, way in ways.items():
            best = min(timeit.repeat(way, number=2000, repeat=9)) / 2000
            print(f"{name:42s} {best * 1e6:6.2f} us")


def _cut(whole, dtypes):
    return [
        whole[at : at + count * dtype.itemsize].view(dtype)
        for dtype, (at, count) in zip(dtypes, PLACES, strict=True)
    ]


if __name__ == "__main__":
    main()
