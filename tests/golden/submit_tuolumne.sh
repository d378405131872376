#!/bin/bash
# flux: --job-name=pathology_1024
# flux: --nodes=4
# flux: --nslots=4
# flux: --cores-per-slot=64
# flux: --gpus-per-slot=4
# flux: --time-limit=60m
# flux: --queue=pbatch
# flux: --bank=project
# flux: --output='RUN_FOLDER/logs/{{id.f58plain}}_0_log.out'
# flux: --signal=SIGUSR2@120s
# flux: --exclusive

export FLUX_ENCLOSING_ID="$(flux getattr jobid)"
module load rocm/6.4.1 || exit 2
export MPICH_OFI_NIC_POLICY=GPU
exec PYTHON -u RUN_FOLDER/provenance/code.zip jobs.launch.batch RUN_FOLDER

# nodes 4, tasks 16, tasks per node 4, CPUs per task 16, GPUs 16, minutes 60, GPU-hours 16
# the script runs:
# flux run --nodes=4 --ntasks=16 --cores-per-task=16 --gpus-per-task=1 --label-io --unbuffered --setopt=exit-on-error --setopt=gpu-affinity=off PYTHON RUN_FOLDER/provenance/code.zip gems.engine.run RUN_FOLDER
