#!/bin/sh
# Builds the kernels with sanitizers and drives them (check.cpp). Usage: sanitize.sh [address|thread] ...
# Exits non-zero on any report. CXX chooses the compiler.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ $# -gt 0 ] || set -- address thread

for kind in "$@"; do
    case $kind in
    address) flags="-fsanitize=address,undefined -fno-sanitize-recover=all" short="" ;;
    thread) flags="-fsanitize=thread" short=short ;;
    *) echo "sanitize.sh: expected address or thread, got $kind" >&2 && exit 2 ;;
    esac
    # Threads of the C++ library, not of OpenMP: ThreadSanitizer must see where they meet. The threshold below which a
    # call stays on one thread is lowered, so that small shapes are shared out too.
    flags="$flags -std=c++17 -O0 -g1 -march=native -ffp-contract=fast -DLATTE_STD_THREADS -DLATTE_MIN_WORK=1e2 -pthread"
    mkdir "$work/$kind"
    for source in $(cd "$here" && ls ./*.cpp | sed "s/[.]cpp$//"); do
        ${CXX:-c++} $flags -DLATTE_ISA=portable -c "$here/$source.cpp" -o "$work/$kind/$source.o" &
        pids="${pids:-} $!"
        # Two at a time: an instrumented build takes memory.
        if [ $((${count:=0} % 2)) -eq 1 ]; then for pid in $pids; do wait "$pid"; done && pids=""; fi
        count=$((count + 1))
    done
    for pid in ${pids:-}; do wait "$pid"; done
    ${CXX:-c++} $flags "$work/$kind"/*.o -o "$work/$kind/check"
    echo "$kind:"
    ASAN_OPTIONS=detect_leaks=1 TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 "$work/$kind/check" $short
done
