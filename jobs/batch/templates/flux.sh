#!/bin/bash
@DIRECTIVES@

export FLUX_ENCLOSING_ID="$(flux getattr jobid)"
@SETUP@
@COMMAND@
