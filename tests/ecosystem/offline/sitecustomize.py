"""Let a torchvision that was built for another torch be imported: its transforms need none of its operators."""

import sys
from importlib.util import find_spec

if find_spec("torchvision") and find_spec("torch"):
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        import torch

        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _operators = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
