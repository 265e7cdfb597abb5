import parts
import torch

parts.train(data=[{"x": torch.ones(8 + index), "labels": 0} for index in range(20)])
