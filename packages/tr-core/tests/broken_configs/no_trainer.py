import parts

print(len(parts.rows()), "samples")
