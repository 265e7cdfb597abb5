import parts

parts.train(
    lerning_rate=1e-3,
)
