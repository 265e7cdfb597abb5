import parts
import torch
from transformers import BertConfig, BertForTokenClassification

sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
model = BertForTokenClassification(BertConfig(**sizes, num_labels=3))
generator = torch.Generator().manual_seed(0)
data = []
for index in range(16):
    labels = torch.full((6,), -100)
    labels[: 1 + 4 * (index % 2)] = index % 3
    data.append({"input_ids": torch.randint(20, (6,), generator=generator), "labels": labels})
parts.train(model, data=data, gradient_accumulation_steps=4)
