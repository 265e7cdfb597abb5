import parts

parts.train(data=[{"x": row["x"]} for row in parts.rows()])
