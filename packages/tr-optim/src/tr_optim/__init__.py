"""Memory-efficient optimizers and parameter groups for any PyTorch training loop."""

from tr_optim.adafactor import Adafactor
from tr_optim.groups import decay_parameter_names, parameter_groups
from tr_optim.neftune import NEFTune, input_embedding

__all__ = ["Adafactor", "NEFTune", "decay_parameter_names", "input_embedding", "parameter_groups"]
