"""What jobs of all batch systems share: resources, launchers, scripts, records and commands."""
