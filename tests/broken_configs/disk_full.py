import parts

parts.train(save_steps=1)
