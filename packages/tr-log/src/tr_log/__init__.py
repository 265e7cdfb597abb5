"""Node-aware logging, progress display and metric sinks for training jobs, without torch."""
