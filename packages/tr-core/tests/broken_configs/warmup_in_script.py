import parts

parts.train(
    warmup_steps=50,
)
