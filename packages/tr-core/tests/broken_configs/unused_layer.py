import parts
import torch

model = parts.Classifier()
model.pooler = torch.nn.Linear(8, 8)
parts.train(model)
