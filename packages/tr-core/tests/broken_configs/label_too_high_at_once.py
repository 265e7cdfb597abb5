import parts

parts.train(data=[{**row, "labels": row["labels"] + 3} for row in parts.rows()])
