#!/bin/bash
# What `hvkit manifest slurm` writes. {{name}} stands for an option or for a value of slurm_job.py;
# of several values, each gets a line. A line without a value is left out, and these comments are.
#SBATCH --job-name={{name}}
#SBATCH --nodes={{hosts}}
#SBATCH --ntasks={{ranks}}
#SBATCH --ntasks-per-node={{slots}}
#SBATCH --cpus-per-task={{cpus}}
# GPUs per host, not per task: each rank sees all GPUs and picks one by its local rank.
#SBATCH --gres=gpu:{{gpus}}
#SBATCH --mem={{memory}}
#SBATCH --time={{time}}
#SBATCH --partition={{partition}}
#SBATCH --account={{account}}
#SBATCH {{for_restarts}}
#SBATCH {{sbatch}}
set -euo pipefail
export PATH={{programs}}:"$PATH"
# exec: a shell in between would not pass Slurm's signals on.
exec {{run}}
