#!/bin/sh
# Builds the kernels for 64-bit ARM, for this machine's instruction sets one by one, and with AVX-512's vectors of 64 bytes made of
# AVX2's, drives all of them over the same inputs (check.cpp), ARM's by emulation, and compares what comes out. Needs
# aarch64-linux-gnu-g++ and qemu-aarch64.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sources=$(cd "$here" && ls ./*.cpp)

build() { # name, compiler and flags
    name=$1 && shift
    mkdir "$work/$name"
    for source in $sources; do
        "$@" -std=c++17 -O2 -ffp-contract=fast -fno-math-errno -DLATTE_ISA=portable -DLATTE_STD_THREADS -DLATTE_MIN_WORK=1e2 -pthread \
            -c "$here/$source" -o "$work/$name/${source%.cpp}.o"
    done
    "$@" -static -pthread "$work/$name"/*.o -o "$work/$name/check"
}

build portable "${CXX:-c++}"
build avx2 "${CXX:-c++}" -mavx2 -mfma
build wide "${CXX:-c++}" -mavx2 -mfma -DLATTE_BYTES=64 -Wno-psabi
build neon aarch64-linux-gnu-g++
"$work/portable/check" tell >"$work/portable.txt"
"$work/avx2/check" tell >"$work/avx2.txt"
"$work/wide/check" tell >"$work/wide.txt"
qemu-aarch64 "$work/neon/check" tell >"$work/neon.txt"
for name in avx2 wide neon; do
    # Sums of many terms, in other orders: float32 agrees to a few parts in 10^5 of the largest.
    paste -d ' ' "$work/portable.txt" "$work/$name.txt" | awk -v name="$name" '
        NF == 6 { d = $3 - $6; if (d < 0) d = -d; s = $3 < 0 ? -$3 : $3; d /= s + 1
                  if (d > worst[$2]) worst[$2] = d; if (d > ($2 == "double" ? 1e-9 : 2e-4)) { bad++; print name ": " $0 }; n++ }
        END { printf "%s: %d calls, %d differ; largest relative difference float %.1e, double %.1e\n", name, n, bad, worst["float"], worst["double"]
              exit bad > 0 || n == 0 }'
done
