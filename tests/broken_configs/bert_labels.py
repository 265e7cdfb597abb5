import parts
import torch
from transformers import BertConfig, BertForSequenceClassification

sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
model = BertForSequenceClassification(BertConfig(**sizes))
parts.train(model, data=[{"input_ids": torch.arange(5), "labels": index % 3} for index in range(16)])
