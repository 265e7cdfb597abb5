"""galore-torch's classes as they are, without its 8-bit one, whose module imports bitsandbytes."""

from tr_optim.adapters.required import require_parts

_ADAMW, _ADAFACTOR, _PROJECTOR = require_parts("galore_torch", ("adamw", "adafactor", "galore_projector"), "none")
AdamW, Adafactor, GaLoreProjector = _ADAMW.AdamW, _ADAFACTOR.Adafactor, _PROJECTOR.GaLoreProjector
