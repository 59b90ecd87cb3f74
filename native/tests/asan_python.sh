#!/bin/sh
# The Python tests of the ring against extensions built with the address and undefined-behaviour sanitizers.
#
#     native/tests/asan_python.sh [TESTS...]     PYTHON=python3.12 chooses the interpreter
#
# Builds into a folder of its own, so that the tree's own extensions stay as they are. Needs the
# packages of `pip install .[test]`. A minute or two.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
PYTHON=${PYTHON:-python3}
CC=${CC:-gcc}
runtime=$($CC -print-file-name=libasan.so)
case $runtime in
/*) ;;
*)
    echo "asan_python: skipped: $CC has no libasan.so"
    exit 0
    ;;
esac
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

mkdir "$out/tree"
cd "$here"
tar -cf - --exclude='*.so' --exclude=__pycache__ --exclude='./.*' --exclude=build . | tar -xf - -C "$out/tree"
cd "$out/tree"
flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1"
CC=$CC CFLAGS="$flags" LDFLAGS="-fsanitize=address,undefined" \
    "$PYTHON" setup.py -q build_ext --inplace --build-temp "$out/build" >"$out/log" 2>&1 || {
    tail -n 30 "$out/log"
    exit 1
}

# Leaks are left out: the interpreter itself keeps what it has until it ends. A bus error is the
# ring's to catch (guard.c), and tests that limit the address space cannot live with a shadow of it.
export ASAN_OPTIONS="detect_leaks=0:handle_sigbus=0:abort_on_error=1:allocator_may_return_null=1"
export UBSAN_OPTIONS="print_stacktrace=1"
export PYTHONPATH="$out/tree" PYTHONMALLOC=malloc SHMRING_UNDER_ASAN=1
LD_PRELOAD="$runtime $($CC -print-file-name=libstdc++.so)" \
    "$PYTHON" -m pytest -q -p no:cacheprovider ${*:-tests/unit/test_ring*.py tests/unit/test_columns*.py tests/unit/test_segment.py \
    tests/unit/test_truncation.py tests/unit/test_aio*.py tests/unit/test_waiter.py tests/abi}
