"""Builds `shmring._native`: the C helper as Python sees it through cffi.

Calls through it release the GIL, so it carries what may block or is rare: mapping,
locks, parking, statistics. The calls of a hot loop are in `shmring._fast`.
"""

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
SOURCES = [
    f"native/src/{name}.c"
    for name in ("end", "producer", "consumer", "park", "segment", "guard", "frame", "frame_check")
]

ffibuilder = FFI()
ffibuilder.cdef((HERE / "cdefs.h").read_text())
ffibuilder.set_source(
    "shmring._native",
    """
    #include "shmring/frame.h"
    #include "shmring/park.h"
    #include "shmring/ring.h"
    #include "shmring/segment.h"
    """,
    sources=SOURCES,
    include_dirs=["native/include"],
    define_macros=[("_GNU_SOURCE", "1")],
    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden"],
)
