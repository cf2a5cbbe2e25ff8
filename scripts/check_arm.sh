#!/usr/bin/env bash
# The Arm build under emulation: the C++ tests on a processor with and one without the dot product instructions, then the
# engine itself, whose tokens must be those of this machine's own.
#
#   scripts/check_arm.sh      needs Debian's g++-aarch64-linux-gnu and qemu-user
set -euo pipefail
cd "$(dirname "$0")/.."

bin=${VENV:-.venv}/bin
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$tool" >/dev/null || { echo "error: $tool is missing: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 1; }
done
cmake=$(command -v "$bin/cmake" || command -v cmake)
ninja=$(command -v "$bin/ninja" || command -v ninja)
"$cmake" -S . -B build-arm -G Ninja -DCMAKE_MAKE_PROGRAM="$(realpath "$ninja")" -DCMAKE_TOOLCHAIN_FILE="$PWD/scripts/arm64.cmake" \
  -DSMOE_PYTHON=OFF -DSMOE_TESTS=ON >/dev/null
"$cmake" --build build-arm --target smoe-tests smoe-engine

# Not the ledger's: qemu answers with a start time of its own when a process asks for its own, not when others do.
tests=(kernels attend quant cache io_ json manifest vault_ threads plan sampler draft options protocol)
for cpu in max cortex-a53; do
  for filter in "${tests[@]}"; do
    echo "-- $cpu: $filter"
    qemu-aarch64 -cpu "$cpu" build-arm/smoe-tests "$filter"
  done
done
"$bin/python" -m pytest -q tests/gates/test_arm.py -m arm
