#!/bin/bash

# Parameters
#SBATCH --account=project
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=8
#SBATCH --job-name=pathology_1024
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=RUN_FOLDER/logs/%j_0_log.out
#SBATCH --partition=standard-g
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=60

# setup
module load LUMI/25.03 partition/G rocm || exit 2
export MIOPEN_USER_DB_PATH=/tmp/miopen-$USER-$SLURM_JOB_ID MIOPEN_CUSTOM_CACHE_DIR=/tmp/miopen-$USER-$SLURM_JOB_ID
export SRUN_CPUS_PER_TASK=7
export MPICH_GPU_SUPPORT_ENABLED=1

# command
export SUBMITIT_EXECUTOR=slurm
exec PYTHON -u RUN_FOLDER/provenance/code.zip submitit.core._submit RUN_FOLDER/logs

# nodes 2, tasks 16, tasks per node 8, CPUs per task 7, GPUs 16, minutes 60, GPU-hours 16, charge 8 GPU-hours
# the script runs:
# srun --nodes=2 --ntasks=16 --ntasks-per-node=8 --cpus-per-task=7 --mpi=cray_shasta --kill-on-bad-exit=1 --wait=60 --label --unbuffered --gpus-per-node=8 --gpu-bind=none --cpu-bind=mask_cpu:7e000000000000,7e00000000000000,7e0000,7e000000,7e,7e00,7e00000000,7e0000000000 PYTHON RUN_FOLDER/provenance/code.zip gems.engine.run RUN_FOLDER
