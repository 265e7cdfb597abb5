"""Optimizers of other libraries, with plain states and checks; each needs its library, an extra of this package.

A loop of your own imports a class from the module of its library: `tr_optim.adapters.torchao.TorchAOAdamW8bit`.
"""
