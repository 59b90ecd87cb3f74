from pathlib import Path

import numpy as np
from setuptools import Extension, setup

HEADERS = sorted(str(path) for path in Path("native").rglob("*.h"))
CORE = [
    f"native/src/{name}.c"
    for name in ("end", "producer", "consumer", "park", "segment", "guard", "frame", "frame_check")
]

setup(
    cffi_modules=["native/native_build.py:ffibuilder", "native/detok_build.py:ffibuilder"],
    ext_modules=[
        Extension(
            "shmring._fast",
            sources=[
                "native/python/fast.c",
                "native/python/producer_core.c",
                "native/python/consumer_core.c",
                "native/python/frame_layout.c",
                "native/python/frame_push.c",
                "native/python/frame_view.c",
                *CORE,
            ],
            depends=HEADERS,
            include_dirs=["native/include", "native/python", np.get_include()],
            define_macros=[("_GNU_SOURCE", "1")],
            # 3: the checks of a frame add up its counts, which is worth vectorising
            extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden"],
        ),
        Extension(
            "manager._egress",
            sources=[
                "native/python/egress.c",
                "native/python/running_batch.c",
                "native/python/running_rows.c",
                "native/src/deal.c",
                *CORE,
            ],
            depends=HEADERS,
            include_dirs=["native/include", "native/python", np.get_include()],
            define_macros=[("_GNU_SOURCE", "1")],
            extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden"],
        ),
    ],
)
