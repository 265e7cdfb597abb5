"""What the tests of this package share: models, data, callbacks, a checkpointer, runs and a counter of reads."""
