import parts

table = {"train": parts.rows()}
parts.train(data=table["training"])
