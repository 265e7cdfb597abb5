import parts

data = parts.rows()
data[13]["labels"] = 3
parts.train(data=data)
