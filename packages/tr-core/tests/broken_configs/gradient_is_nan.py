import parts


class Rooted(parts.Classifier):
    def loss(self, logits, labels):
        return super().loss(logits, labels) + (0 * logits).sum().sqrt()


parts.train(Rooted())
