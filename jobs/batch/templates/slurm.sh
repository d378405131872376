#!/bin/bash

# Parameters
@DIRECTIVES@

# setup
@SETUP@

# command
export SUBMITIT_EXECUTOR=slurm
@COMMAND@
