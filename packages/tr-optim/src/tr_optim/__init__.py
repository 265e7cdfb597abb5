"""Memory-efficient optimizers and parameter groups for any PyTorch training loop."""

from tr_optim.adafactor import Adafactor
from tr_optim.adalomo import AdaLomo
from tr_optim.adamw_8bit import AdamW8bit
from tr_optim.apollo import APOLLOAdamW
from tr_optim.engine.fused import LossScaler
from tr_optim.fira import FiraAdamW
from tr_optim.galore import GaLoreAdafactor, GaLoreAdamW, GaLoreAdamW8bit
from tr_optim.groups import decay_parameter_names, parameter_groups
from tr_optim.lomo import Lomo
from tr_optim.neftune import NEFTune, input_embedding
from tr_optim.targets import Targets, find_targets

__all__ = [
    "APOLLOAdamW",
    "AdaLomo",
    "Adafactor",
    "AdamW8bit",
    "FiraAdamW",
    "GaLoreAdafactor",
    "GaLoreAdamW",
    "GaLoreAdamW8bit",
    "Lomo",
    "LossScaler",
    "NEFTune",
    "Targets",
    "decay_parameter_names",
    "find_targets",
    "input_embedding",
    "parameter_groups",
]
