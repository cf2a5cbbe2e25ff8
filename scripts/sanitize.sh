#!/usr/bin/env bash
# The C++ tests and the fuzz drivers under AddressSanitizer and UBSan, the threaded ones under ThreadSanitizer.
#
#   scripts/sanitize.sh [SECONDS]     fuzz each driver (scripts/fuzz_*.cpp) for SECONDS, 60 if not said
#
# The seed is printed, so that a run can be had again: SEED=n scripts/sanitize.sh. A driver names the one seed that repeats
# what it found (see scripts/fuzz.h). Any finding ends the script with a non-zero exit code.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
seed=${SEED:-$(date +%s)}
bin=${VENV:-.venv}/bin
cmake=$(command -v "$bin/cmake" || command -v cmake)
ninja=$(command -v "$bin/ninja" || command -v ninja)
threaded=(threads_ io_ cache_ prefault_ upkeep_ protocol_ wire_ vault_written vault_trunk)  # every test whose code starts a thread; filters are parts of names

configure_and_build() {  # folder, sanitizers, targets...
  local folder=$1 sanitizers=$2
  shift 2
  "$cmake" -S . -B "$folder" -G Ninja -DCMAKE_MAKE_PROGRAM="$(realpath "$ninja")" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DSMOE_PYTHON=OFF -DSMOE_TESTS=ON -DSMOE_SANITIZE="$sanitizers" >/dev/null
  "$cmake" --build "$folder" --target "$@"
}

drivers=()
for source in scripts/fuzz_*.cpp; do
  [ -e "$source" ] && drivers+=("$(basename "$source" .cpp)")
done

echo "== address and undefined: tests"
export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1:check_initialization_order=1
export UBSAN_OPTIONS=print_stacktrace=1
configure_and_build build-asan address,undefined smoe-tests "${drivers[@]}"
build-asan/smoe-tests

for driver in "${drivers[@]}"; do
  echo "== address and undefined: $driver for $seconds s, seed $seed"
  "build-asan/$driver" --seconds "$seconds" --seed "$seed"
done

echo "== thread: tests"
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
configure_and_build build-tsan thread smoe-tests
for filter in "${threaded[@]}"; do
  echo "-- $filter"
  build-tsan/smoe-tests "$filter"
done
echo "sanitizers clean"
