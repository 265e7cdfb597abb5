import parts

parts.train(
    optim="sgd",
    optim_args="nesterov=true",
)
