import parts

parts.Trainer(parts.Classifier(), parts.arguments()).train()
