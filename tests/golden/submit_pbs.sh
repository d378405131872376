#!/bin/bash -l
#PBS -N pathology_1024
#PBS -l select=4:ncpus=32:mpiprocs=4:ngpus=4
#PBS -l place=scatter:excl
#PBS -l walltime=01:00:00
#PBS -A project
#PBS -j oe
#PBS -o RUN_FOLDER/logs/
#PBS -r y

cd "${PBS_O_WORKDIR:-.}" || exit 2
{ sleep 3480 && kill -USR2 $$; } </dev/null >/dev/null 2>&1 &  # PBS sends no signal
exec PYTHON -u RUN_FOLDER/provenance/code.zip jobs.launch.batch RUN_FOLDER

# nodes 4, tasks 16, tasks per node 4, CPUs per task 8, GPUs 16, minutes 60, GPU-hours 16
# the script runs:
# mpiexec -n 16 -ppn 4 PYTHON RUN_FOLDER/provenance/code.zip gems.engine.run RUN_FOLDER
