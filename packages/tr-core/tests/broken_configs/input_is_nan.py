import parts

data = parts.rows()
data[0]["x"][3] = float("nan")
parts.train(data=data)
