import parts

parts.train(parts.Classifier().requires_grad_(False))
