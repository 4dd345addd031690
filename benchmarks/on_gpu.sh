#!/bin/sh
# All that a machine with an NVIDIA GPU can tell of this project, within eight minutes: see benchmarks/on_gpu.py.
#
#   benchmarks/on_gpu.sh [--out DIR] [--wheels DIR]
#   benchmarks/on_gpu.sh --device cpu --short        a rehearsal without a GPU
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" -m benchmarks.on_gpu "$@"
