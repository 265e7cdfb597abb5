"""The Trainer: the methods that users call and override."""
