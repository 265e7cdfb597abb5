import parts


class Logarithmic(parts.Classifier):
    def loss(self, logits, labels):
        return logits.clamp(max=-1).log().mean()


parts.train(Logarithmic())
