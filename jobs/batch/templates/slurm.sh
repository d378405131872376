#!/bin/bash

# Parameters
@DIRECTIVES@

# setup
@TASK@
@SETUP@

# command
export SUBMITIT_EXECUTOR=slurm
@COMMAND@
