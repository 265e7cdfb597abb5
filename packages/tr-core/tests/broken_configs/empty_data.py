import parts

parts.train(data=[])
