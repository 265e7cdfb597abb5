import parts
import torch
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1))
generator = torch.Generator().manual_seed(0)
data = []
for index in range(16):
    words = torch.randint(20, (6,), generator=generator)
    data.append({"input_ids": words, "labels": torch.where(torch.arange(6) < 2 + index % 4, words, -100)})
parts.train(model, data=data, gradient_accumulation_steps=4)
