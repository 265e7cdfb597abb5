import parts

parts.train(eval_dataset=[], eval_strategy="epoch")
