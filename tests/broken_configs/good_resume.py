import parts

parts.train(output_dir="run", resume="run/checkpoint-2", optim="adafactor", save_total_limit=2)
