"""The two functions of NLTK that the script for summaries calls, without its data files."""

from types import SimpleNamespace

data = SimpleNamespace(find=lambda name: name)


def sent_tokenize(text):
    return text.split(". ")
