#!/bin/bash

# Parameters
#SBATCH --account=project
#SBATCH --constraint=MI250
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=pathology_1024
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=RUN_FOLDER/logs/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --threads-per-core=1
#SBATCH --time=60

# setup
module load cpe craype-accel-amd-gfx90a cray-mpich || exit 2
export MIOPEN_USER_DB_PATH=/tmp/miopen-$USER-$SLURM_JOB_ID MIOPEN_CUSTOM_CACHE_DIR=/tmp/miopen-$USER-$SLURM_JOB_ID
export SRUN_CPUS_PER_TASK=8

# command
export SUBMITIT_EXECUTOR=slurm
exec PYTHON -u RUN_FOLDER/provenance/code.zip submitit.core._submit RUN_FOLDER/logs

# nodes 2, tasks 16, tasks per node 8, CPUs per task 8, GPUs 16, minutes 60, GPU-hours 16
# the script runs:
# srun --nodes=2 --ntasks=16 --ntasks-per-node=8 --cpus-per-task=8 --mpi=cray_shasta --kill-on-bad-exit=1 --wait=60 --label --unbuffered --gpus-per-node=8 --gpu-bind=closest PYTHON RUN_FOLDER/provenance/code.zip gems.engine.run RUN_FOLDER
