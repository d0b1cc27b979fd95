#!/bin/sh
# Speed on GPUs, which has not been measured yet. In the virtual environment of
# `make setup HVKIT_GPU=nccl`, on a host with several NVIDIA GPUs:
#
#     bench/gpu.sh
#
# Prints what is found on the host, and tables of hvkit beside DDP over NCCL and training without
# communication. Report all of it.
set -eu
cd "$(dirname "$0")/.."
hvkit doctor
nvidia-smi topo -m
records=$(mktemp)
gpus=$(nvidia-smi --list-gpus | wc -l)
python bench/speed.py train --gpu --ranks "$gpus" --rounds 3 --records "$records"
python bench/speed.py report --records "$records"
