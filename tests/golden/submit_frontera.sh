#!/bin/bash

# Parameters
#SBATCH --account=project
#SBATCH --cpus-per-task=14
#SBATCH --job-name=pathology_1024
#SBATCH --nodes=4
#SBATCH --ntasks=16
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=RUN_FOLDER/logs/%j_0_log.out
#SBATCH --partition=development
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=60

# setup
export SRUN_CPUS_PER_TASK=14

# command
export SUBMITIT_EXECUTOR=slurm
exec PYTHON -u RUN_FOLDER/provenance/code.zip submitit.core._submit RUN_FOLDER/logs

# nodes 4, tasks 16, tasks per node 4, CPUs per task 14, GPUs 0, minutes 60, GPU-hours 0
# the script runs:
# ibrun PYTHON RUN_FOLDER/provenance/code.zip gems.engine.run RUN_FOLDER
