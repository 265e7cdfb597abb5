"""Optimizers of other libraries, with plain states and checks; each needs its library, an extra of this package."""
