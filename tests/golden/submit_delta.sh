#!/bin/bash

# Parameters
#SBATCH --account=project-delta-gpu
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --job-name=pathology_1024
#SBATCH --mem=208g
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=RUN_FOLDER/logs/%j_0_log.out
#SBATCH --partition=gpuA100x4
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=60

# setup
module load PrgEnv-gnu cudatoolkit/25.3_12.8 cray-mpich || exit 2
export SRUN_CPUS_PER_TASK=16

# command
export SUBMITIT_EXECUTOR=slurm
exec PYTHON -u RUN_FOLDER/provenance/code.zip submitit.core._submit RUN_FOLDER/logs

# nodes 4, tasks 16, tasks per node 4, CPUs per task 16, GPUs 16, minutes 60, GPU-hours 16
# the script runs:
# srun --nodes=4 --ntasks=16 --ntasks-per-node=4 --cpus-per-task=16 --kill-on-bad-exit=1 --wait=60 --label --unbuffered --gpus-per-node=4 --gpu-bind=none PYTHON RUN_FOLDER/provenance/code.zip gems.engine.run RUN_FOLDER
