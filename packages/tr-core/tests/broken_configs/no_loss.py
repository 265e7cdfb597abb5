import parts


class Silent(parts.Classifier):
    def forward(self, x, labels=None):
        return {"logits": self.layers(x)}


parts.train(Silent())
