#!/bin/bash

# Parameters
#SBATCH --account=project
#SBATCH --cpus-per-task=18
#SBATCH --gpus-per-node=4
#SBATCH --job-name=pathology_1024
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=RUN_FOLDER/logs/%j_0_log.out
#SBATCH --partition=gpu_a100
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=60

# setup
export SRUN_CPUS_PER_TASK=18

# command
export SUBMITIT_EXECUTOR=slurm
exec PYTHON -u RUN_FOLDER/provenance/code.zip submitit.core._submit RUN_FOLDER/logs

# nodes 4, tasks 16, tasks per node 4, CPUs per task 18, GPUs 16, minutes 60, GPU-hours 16, charge 2048 SBU
# the script runs:
# srun --nodes=4 --ntasks=16 --ntasks-per-node=4 --cpus-per-task=18 --kill-on-bad-exit=1 --wait=60 --label --unbuffered --gpus-per-node=4 --gpu-bind=none PYTHON RUN_FOLDER/provenance/code.zip gems.engine.run RUN_FOLDER
