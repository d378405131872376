"""What jobs of all batch systems share: resources, script, records, and how commands are run."""
