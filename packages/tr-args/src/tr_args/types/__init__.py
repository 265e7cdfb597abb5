"""Types of training arguments that need more than a plain type: choices, durations, options, sharding."""
