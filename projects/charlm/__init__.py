"""A language model of characters. Importing it registers the datasets, the network and the check of the corpus."""

from projects.charlm.corpus import (
    UNKNOWN,
    VOCABULARY,
    Corpus,
    SameCorpus,
    decode,
    encode,
    read_corpus,
    split_of,
)
from projects.charlm.data import WINDOW, TextWindows
from projects.charlm.model import GPT

__all__ = [
    "Corpus",
    "GPT",
    "SameCorpus",
    "TextWindows",
    "UNKNOWN",
    "VOCABULARY",
    "WINDOW",
    "decode",
    "encode",
    "read_corpus",
    "split_of",
]
