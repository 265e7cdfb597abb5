import parts
import torch

model = parts.Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for row in parts.rows():
    model(row["x"][None], torch.tensor([row["labels"]]))["loss"].backward()
    optimizer.step()
