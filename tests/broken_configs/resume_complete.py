import parts

parts.train(output_dir="run", resume=True)
