#!/bin/bash -l
@DIRECTIVES@

cd "${PBS_O_WORKDIR:-.}" || exit 2
@SIGNAL@
@SETUP@
@COMMAND@
