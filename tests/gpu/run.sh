#!/usr/bin/env bash
# What only a GPU can show, in less than 8 minutes: prints one JSON. Installs nothing and needs no network: Python 3.11 or
# newer with torch (2.11 or newer), transformers, accelerate, triton and pytest must be there.
#
#   tests/gpu/run.sh [FILE]     FILE gets the JSON too
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
# as an installed package: kernels/ lies inside hf_cb there
mkdir "$tree/hf_cb"
ln -s "$root"/hf_cb/* "$tree/hf_cb/"
ln -s "$root/kernels" "$tree/hf_cb/kernels"
export PYTHONPATH="$tree:$root/tests:$root/tests/gpu${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
cd "$root"
exec "${PYTHON:-python3}" -P tests/gpu/run.py "$@"
