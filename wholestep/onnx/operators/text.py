"""Operators on text and on image files: named, so that the error says more than that they are unknown."""

from __future__ import annotations

from ..context import Context, Item
from . import operator


@operator(
    "ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer", folds=False
)
def before_the_model(c: Context, *inputs: Item):
    raise c.unsupported("text and image files are not supported", "do this to the data, before the model")
