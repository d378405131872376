"""The studies of the vDNN paper, by simulation: networks call by call, as cuDNN runs them, on a modelled device."""
