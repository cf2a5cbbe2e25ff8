#!/usr/bin/env bash
# ik_llama.cpp as a peer to be measured: its library, built from source for this CPU, in a virtual environment FOLDER.
#
#     scripts/build_ik_llama.sh FOLDER
#
# pip cannot build the package: its source archive lacks a file that only the command-line tools need, and the wheel has
# no AVX-512. So the library alone is built, and put where the package looks for it. Takes a quarter of an hour.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
version=0.1.5
python3 -m venv "$folder"
"$folder/bin/pip" install -q numpy cmake ninja scikit-build-core
"$folder/bin/pip" install -q --no-deps --only-binary :all: "ik-llama-cpp-python==$version"  # the Python side; its library goes
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$folder/bin/pip" download -q --no-deps --no-binary :all: --no-build-isolation -d "$work" "ik-llama-cpp-python==$version"
tar xzf "$work"/*.tar.gz -C "$work"
export PATH="$folder/bin:$PATH"
cmake -G Ninja -S "$work"/ik_llama*/vendor/ik_llama.cpp -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_IQK_FA_ALL_QUANTS=OFF \
  -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON '-DCMAKE_INSTALL_RPATH=$ORIGIN'
cmake --build "$work/build" --target llama
package=$("$folder/bin/python" -c 'import importlib.util as u; print(u.find_spec("ik_llama_cpp").submodule_search_locations[0])')
rm -rf "$package"/lib/*
find "$work/build" -name 'lib*.so*' -exec cp -P {} "$package/lib/" \;
"$folder/bin/python" -c 'import ik_llama_cpp._lib_loader as l; l.load_shared_library()'
echo "ready: $folder/bin/python"
