#!/bin/bash

# Parameters
#SBATCH --account=project
#SBATCH --cpus-per-task=20
#SBATCH --export=NONE
#SBATCH --gres=gpu:4
#SBATCH --job-name=pathology_1024
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=RUN_FOLDER/logs/%j_0_log.out
#SBATCH --qos=acc_ehpc
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=60

# setup
export SRUN_CPUS_PER_TASK=20
export OMPI_MCA_pml=ucx
export OMPI_MCA_mtl='^ofi'
export OMPI_MCA_btl='^ofi'

# command
export SUBMITIT_EXECUTOR=slurm
exec PYTHON -u RUN_FOLDER/provenance/code.zip submitit.core._submit RUN_FOLDER/logs

# nodes 4, tasks 16, tasks per node 4, CPUs per task 20, GPUs 16, minutes 60, GPU-hours 16
# the script runs:
# srun --nodes=4 --ntasks=16 --ntasks-per-node=4 --cpus-per-task=20 --mpi=pmix --kill-on-bad-exit=1 --wait=60 --label --unbuffered --gres=gpu:4 --gpu-bind=none PYTHON RUN_FOLDER/provenance/code.zip gems.engine.run RUN_FOLDER
