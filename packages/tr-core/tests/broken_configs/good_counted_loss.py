import parts

parts.train(parts.Words(), data=parts.sentences(), gradient_accumulation_steps=2)
