#!/bin/sh
# The C core under sanitizers and a litmus test, without Python. Under a minute in all.
#
#     native/tests/run.sh [tsan|asan|detok|litmus|mutants|deaths]...      (default: all of them)
#
# `deaths` looks at what a kill would leave behind after each single instruction of each operation.
# `mutants` breaks one memory order at a time and expects tsan or the litmus to find it: what proves
# that the other three would find such a mistake.
set -eu
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
CC=${CC:-gcc}
core="end producer consumer park segment guard frame frame_check"
flags="-std=gnu11 -D_GNU_SOURCE -g -O2 -Wall -Wextra -Wconversion -Werror -pthread -Inative/include"

# build NAME MAIN FOLDER_OF_SOURCES FLAGS...
build() {
    name=$1 main=$2 folder=$3
    shift 3
    sources=""
    for part in $core; do sources="$sources $folder/$part.c"; done
    # shellcheck disable=SC2086  # lists of words
    $CC $flags "$@" -Inative/src "native/tests/$main.c" $sources -o "$out/$name"
}

# The thread sanitizer of older compilers cannot live with many bits of address randomisation.
still() {
    if command -v setarch >/dev/null; then setarch "$(uname -m)" -R "$@"; else "$@"; fi
}

tsan() {
    build tsan stress native/src -fsanitize=thread
    TSAN_OPTIONS="halt_on_error=1 exitcode=66" still "$out/tsan" 20000
}

asan() {
    build asan stress native/src -fsanitize=address,undefined -fno-sanitize-recover=all
    "$out/asan" 40000
}

detok() {
    build detok detok_fuzz native/src -fsanitize=address,undefined -fno-sanitize-recover=all \
        native/src/detok.c native/src/detok_stop.c native/src/detok_batch.c native/src/detok_step.c
    "$out/detok" 5000
}

litmus() {
    build litmus litmus native/src
    "$out/litmus" 1000000
}

deaths() {
    build deaths any_instruction native/src
    "$out/deaths"
}

# mutate NAME FILE FROM TO: a copy of the sources with one order weakened
mutate() {
    rm -rf "$out/src"
    cp -r native/src "$out/src"
    sed "s/$3/$4/" "native/src/$2.c" >"$out/src/$2.c"
    if cmp -s "native/src/$2.c" "$out/src/$2.c"; then
        echo "mutant $1: its line has changed, so must this script" >&2
        exit 1
    fi
}

# found NAME COMMAND...: the mutant must fail
found() {
    name=$1
    shift
    if "$@" >"$out/log" 2>&1; then
        echo "mutant $name: NOT found" >&2
        cat "$out/log" >&2
        exit 1
    fi
    echo "mutant $name: found"
}

mutants() {
    export TSAN_OPTIONS="halt_on_error=1 exitcode=66"
    mutate "S1 relaxed" producer 'tail, p->pending, memory_order_seq_cst' 'tail, p->pending, memory_order_relaxed'
    build mutant stress "$out/src" -fsanitize=thread
    found "S1 published without release" still "$out/mutant" 20000

    mutate "S2 relaxed" consumer 'head, c->read, memory_order_seq_cst' 'head, c->read, memory_order_relaxed'
    build mutant stress "$out/src" -fsanitize=thread
    found "S2 freed without release" still "$out/mutant" 20000

    mutate "S2 early" producer 'read_head(p, memory_order_acquire)' 'read_head(p, memory_order_relaxed)'
    sed -i 's/read_head(p, memory_order_seq_cst)/read_head(p, memory_order_relaxed)/' "$out/src/producer.c"
    build mutant stress "$out/src" -fsanitize=thread
    found "S2 room seen without acquire" still "$out/mutant" 20000

    mutate "S1 early" consumer 'read_tail(c, memory_order_acquire)' 'read_tail(c, memory_order_relaxed)'
    sed -i 's/read_tail(c, memory_order_seq_cst)/read_tail(c, memory_order_relaxed)/' "$out/src/consumer.c"
    build mutant stress "$out/src" -fsanitize=thread
    found "S1 tail seen without acquire" still "$out/mutant" 20000

    mutate "S3 release" producer 'tail, p->pending, memory_order_seq_cst' 'tail, p->pending, memory_order_release'
    sed -i 's/consumer_parked, value, memory_order_seq_cst/consumer_parked, value, memory_order_release/' "$out/src/park.c"
    build mutant litmus "$out/src"
    found "S3 with release and acquire only" "$out/mutant" 1000000
}

for target in ${*:-tsan asan detok litmus mutants deaths}; do
    "$target"
done
