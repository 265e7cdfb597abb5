"""Settings that are switched on for a run and off after it."""
