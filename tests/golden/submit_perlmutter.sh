#!/bin/bash

# Parameters
#SBATCH --account=project_g
#SBATCH --constraint=gpu
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --job-name=pathology_1024
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=RUN_FOLDER/logs/%j_0_log.out
#SBATCH --qos=regular
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=60

# setup
module load gpu cudatoolkit craype-accel-nvidia80 || exit 2
export SRUN_CPUS_PER_TASK=32
export MPICH_GPU_SUPPORT_ENABLED=1
export MPICH_OFI_NIC_POLICY=GPU
export FI_MR_CACHE_MONITOR=userfaultfd

# command
export SUBMITIT_EXECUTOR=slurm
exec PYTHON -u RUN_FOLDER/provenance/code.zip submitit.core._submit RUN_FOLDER/logs

# nodes 4, tasks 16, tasks per node 4, CPUs per task 32, GPUs 16, minutes 60, GPU-hours 16
# the script runs:
# srun --nodes=4 --ntasks=16 --ntasks-per-node=4 --cpus-per-task=32 --mpi=cray_shasta --kill-on-bad-exit=1 --wait=60 --label --unbuffered --gpus-per-node=4 --gpu-bind=none --cpu-bind=cores PYTHON RUN_FOLDER/provenance/code.zip gems.engine.run RUN_FOLDER
