"""Optimizers of other libraries, held to what an optimizer promises; each needs its library, an extra of this one."""
