import parts

parts.train(save_steps=1, save_total_limit=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True)
