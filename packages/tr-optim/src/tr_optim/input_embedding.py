"""Find the module that turns a model's input ids into vectors."""

from __future__ import annotations

from torch import nn


def input_embedding(model: nn.Module) -> nn.Module:
    """Return the module that turns a model's input ids into vectors.

    That is `model` itself if it is an `nn.Embedding`, what its `get_input_embeddings()` returns, or the only
    `nn.Embedding` in it.

    Raises:
        ValueError: there is none, or more than one; the message names the candidates.
    """
    if isinstance(model, nn.Embedding):
        return model
    named = _named_by_model(model)
    if named is not None:
        return named
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    if len(found) == 1:
        return next(iter(found.values()))
    name = type(model).__name__
    if not found:
        raise ValueError(f"{name} has no nn.Embedding and no get_input_embeddings(); give the embedding module itself")
    raise ValueError(
        f"{name} has {len(found)} embeddings ({', '.join(found)}) and no get_input_embeddings() to tell the input's; "
        f"give one, for instance model.{next(iter(found))}"
    )


def _named_by_model(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_input_embeddings", None)
    if get is None:
        return None
    try:
        embedding = get()
    except (NotImplementedError, AttributeError):  # base classes define the method for models that have no embedding
        return None
    return embedding if isinstance(embedding, nn.Module) else None
