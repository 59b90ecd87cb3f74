#!/bin/sh
# The C core under Relacy, which explores interleavings and what the C11 memory model allows.
#
#     native/tests/relacy/run.sh [ITERATIONS]     (default: 40000 random schedules a test)
#
# Builds the sources of native/ as C++ (translate.sed), runs every test with random schedules and
# with all schedules up to a number of preemptions, then weakens each memory order in turn and
# expects to be told. Half a minute. README.md says what it shows and what it does not.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
native=$(cd "$here/../.." && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
CXX=${CXX:-g++}

has_relacy() {
    command -v "$CXX" >/dev/null && echo '#include <relacy/relacy.hpp>' | "$CXX" -std=gnu++17 -w -fpermissive -E -x c++ - >/dev/null 2>&1
}
if ! has_relacy && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++ relacy-dev; } \
        >/dev/null 2>&1 || true
fi
if ! has_relacy; then
    echo "relacy: skipped: no relacy/relacy.hpp for $CXX (Debian: apt-get install g++ relacy-dev)"
    exit 0
fi

for source in include/shmring/layout.h include/shmring/ring.h include/shmring/park.h include/shmring/segment.h \
    src/end.h src/end.c src/producer.c src/consumer.c src/park.c src/segment.c; do
    echo "#line 1 \"native/$source\""
    sed -f "$here/translate.sed" "$native/$source"
done >"$out/core.inc"
# -w: the translation mixes two languages, and the C is compiled with all warnings elsewhere
"$CXX" -std=gnu++17 -O1 -g -w -fpermissive -I"$out" -I"$here" "$here/check.cpp" -o "$out/check"

if ! "$out/check" exhaustive "${1:-40000}" "$out/history"; then
    echo "what happened, step by step:"
    tail -n 200 "$out/history"
    exit 1
fi
echo
echo "each memory order weakened in turn, and what tells of it:"
"$out/check" weaken 10000
