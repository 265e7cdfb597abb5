import parts
import torch

model = parts.Classifier()
torch.nn.init.constant_(model.layers[3].weight, float("inf"))
parts.train(model)
