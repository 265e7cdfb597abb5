import parts

parts.train(eval_strategy="epoch")
