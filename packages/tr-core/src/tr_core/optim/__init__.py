"""Optimizers, rules for parameters, learning-rate schedules, and steps that are skipped."""
