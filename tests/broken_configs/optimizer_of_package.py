import parts

parts.train(optim="adafactor", optim_args="relative_steps=true")
