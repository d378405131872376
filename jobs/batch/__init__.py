"""Jobs of all batch systems: resources, launchers, scripts and commands."""
