"""What is optimized and how fast: optimizers, rules for parameters, schedules, steps that are left out."""
