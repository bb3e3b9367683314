"""Operators on text, computed at import by Python; and those on regular expressions and image files, which are refused.

Operators that only move or compare elements need no rule for text: their own rule runs on numbers that stand for the
strings (`Walk.text_by_numbers`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..context import Context, Item, Tensor
from ..text import Text, array_of
from . import operator

#: languages whose small and capital letters are not paired as Unicode's common rules pair them
OTHER_CASES = ("tr", "az", "lt")
#: n-grams that TfIdfVectorizer looks at while importing
MAX_GRAMS = 1 << 22


@operator("ImageDecoder", folds=False)
def image_decoder(c: Context, *inputs: Item):
    raise c.unsupported("image files are not supported", "decode them before the model")


@operator("RegexFullMatch", text=True)
def regex_full_match(c: Context, x: Text):
    raise c.unsupported(
        "regular expressions of a file are not run: one of them can take for ever", "do this to the data"
    )


@operator("StringNormalizer", text=True)
def string_normalizer(c: Context, x: Text):
    if len(x.shape) not in (1, 2) or (len(x.shape) == 2 and x.shape[0] != 1):
        raise c.wrong(f"it takes text of shape [C] or [1, C], not {list(x.shape)}")
    locale = c.attribute("locale") or "en_US"
    change = c.attribute("case_change_action")
    if change not in ("NONE", "LOWER", "UPPER"):
        raise c.wrong(f"its case_change_action is {change!r}, not NONE, LOWER or UPPER")
    exact = bool(c.attribute("is_case_sensitive"))
    stopwords = c.attribute("stopwords") or []
    cased = change != "NONE" or (stopwords and not exact)
    if cased and locale.lower().replace("-", "_").partition("_")[0] in OTHER_CASES:
        raise c.unsupported(f"small and capital letters of the locale {locale!r} are not supported")
    stops = set(stopwords) if exact else {word.lower() for word in stopwords}
    kept = [word for word in x.array.reshape(-1) if (word if exact else word.lower()) not in stops]
    if change != "NONE":
        kept = [word.lower() if change == "LOWER" else word.upper() for word in kept]
    kept = kept or [""]
    return c.text(array_of(kept, [1] * (len(x.shape) - 1) + [len(kept)]))


@operator("StringConcat", text=True)
def string_concat(c: Context, x: Text, y: Text):
    shape = np.broadcast_shapes(x.shape, y.shape)
    count = int(np.prod(shape, dtype=object))
    longest = max((len(word) for word in x.array.reshape(-1)), default=0)
    longest += max((len(word) for word in y.array.reshape(-1)), default=0)
    c.afford_text(count, count * longest)
    left, right = np.broadcast_to(x.array, shape), np.broadcast_to(y.array, shape)
    return c.text(array_of((a + b for a, b in zip(left.flat, right.flat, strict=True)), shape))


@operator("StringSplit", text=True)
def string_split(c: Context, x: Text):
    limit = c.attribute("maxsplit")
    parts = [word.split(c.attribute("delimiter") or None, -1 if limit is None else limit) for word in x.array.flat]
    most = max((len(part) for part in parts), default=0)
    c.afford_text(len(parts) * most, 0)
    padded = [word for part in parts for word in part + [""] * (most - len(part))]
    counts = torch.tensor([len(part) for part in parts], dtype=torch.int64).reshape(x.shape)
    return c.text(array_of(padded, (*x.shape, most))), c.constant(counts)


@operator("TfIdfVectorizer", text=True)
def tf_idf_of_text(c: Context, x: Text):
    return tf_idf(c, x.array, c.attribute("pool_strings"))


@operator("TfIdfVectorizer", folds=False)
def tf_idf_of_numbers(c: Context, x: Tensor):
    return tf_idf(c, c.known(x, "sequence of words").numpy(), c.attribute("pool_int64s"))


def tf_idf(c: Context, words: np.ndarray, pool: list[Any] | None) -> Tensor:
    """How often each n-gram of the pool occurs in each row, words up to `max_skip_count` apart counted, too."""
    if pool is None:
        raise c.wrong("it has no pool of n-grams of the type of its input")
    if words.ndim not in (1, 2) or (words.ndim == 2 and not words.shape[0]):
        raise c.wrong(f"it takes a tensor of shape [C] or [B, C], not {list(words.shape)}")
    least, most, skips = (c.attribute(n) for n in ("min_gram_length", "max_gram_length", "max_skip_count"))
    starts, columns, weights = c.attribute("ngram_counts"), c.attribute("ngram_indexes"), c.attribute("weights")
    mode = c.attribute("mode")
    if mode not in ("TF", "IDF", "TFIDF"):
        raise c.wrong(f"its mode is {mode!r}, not TF, IDF or TFIDF")
    if not 1 <= least <= most or skips < 0 or not columns or min(columns) < 0:
        raise c.wrong("its lengths of n-grams, its skips or its ngram_indexes are out of range")
    grams = pool_of(c, pool, starts)
    if len(grams) != len(columns):
        raise c.wrong(f"its pool has {len(grams)} n-grams, but {len(columns)} ngram_indexes")
    if weights and mode != "TF" and columns != list(range(len(weights))):
        raise c.unsupported("weights of n-grams that are not in the order of the output are not supported")
    column = {gram: at for gram, at in zip(grams, columns, strict=True) if least <= len(gram) <= most}
    lengths = sorted({len(gram) for gram in column})
    rows = words.tolist() if words.ndim == 2 else [words.tolist()]
    c.afford_text(len(rows) * (max(columns) + 1), 0)
    if words.size * len(lengths) * (min(skips, words.shape[-1]) + 1) > MAX_GRAMS:
        raise c.limit(f"it looks at more than {MAX_GRAMS} n-grams")
    counts = np.zeros((len(rows), max(columns) + 1), np.float32)
    for row, line in enumerate(rows):
        for length in lengths:
            for distance in range(1, 2 if length == 1 else min(skips, len(line)) + 2):
                for start in range(len(line) - distance * (length - 1)):
                    found = column.get(tuple(line[start : start + distance * (length - 1) + 1 : distance]))
                    if found is not None:
                        counts[row, found] += 1
    if mode == "IDF":
        counts = (counts > 0).astype(np.float32)
    if weights and mode != "TF":
        counts = counts * np.asarray(weights, np.float32)
    return c.constant(torch.from_numpy(counts if words.ndim == 2 else counts[0]))


def pool_of(c: Context, pool: list[Any], starts: list[int]) -> list[tuple[Any, ...]]:
    """The n-grams of a pool in order; those of length n begin at the n-th of `starts`."""
    ends = [*starts[1:], len(pool)]
    grams = []
    for length, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
        if not 0 <= start <= end <= len(pool) or (end - start) % length:
            raise c.wrong(f"its ngram_counts {starts[:8]} do not fit a pool of {len(pool)}")
        grams += [tuple(pool[at : at + length]) for at in range(start, end, length)]
    return grams
