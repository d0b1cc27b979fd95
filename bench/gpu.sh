#!/bin/sh
# What hvkit gives and costs on NVIDIA GPUs. In the virtual environment of
# `make setup HVKIT_GPU=nccl`, on a host with one or several:
#
#     bench/gpu.sh
#
# Prints what is found on the host; one rank on NCCL, and two that share a GPU, beside training
# without hvkit; and, with several GPUs, tables of hvkit beside DDP over NCCL and training without
# communication. Report all of it.
set -eu
cd "$(dirname "$0")/.."
hvkit doctor || true
nvidia-smi topo -m || true
python bench/gpu.py
gpus=$(nvidia-smi --list-gpus | wc -l)
[ "$gpus" -gt 1 ] || exit 0
records=$(mktemp)
python bench/speed.py train --gpu --ranks "$gpus" --rounds 3 --records "$records"
python bench/speed.py report --records "$records"
