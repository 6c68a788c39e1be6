"""What signs say: words and numbers that are drawn anew each time, so that reading can't be guessing from a list.

A third are random letters, a third are pronounceable, the rest numbers and mixtures. Held out is one in ten by its
checksum: training never shows those.
"""

from __future__ import annotations

import random
import string
import zlib

from qwen35mm.evaluation.scenes import Split

MOST_LETTERS = 8
_VOWELS = "aeiou"
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_ONSETS = ("b", "bl", "br", "c", "ch", "cl", "d", "dr", "f", "fl", "g", "gr", "h", "j", "l", "m", "n", "p", "pl", "pr",
           "r", "s", "sh", "sp", "st", "str", "t", "th", "tr", "v", "w", "")  # fmt: skip
_MIDDLES = ("a", "e", "i", "o", "u", "ai", "ea", "ee", "oo", "ou")
_CODAS = ("", "", "b", "ck", "d", "g", "l", "m", "n", "nd", "ng", "p", "r", "rt", "s", "st", "t", "x")
_ENDINGS = ("", "", "", "er", "ity", "tion", "ing", "al", "ment", "ness", "age", "ure", "y", "ance", "ic", "ful")
_CASES = (str.upper, str.lower, str.capitalize)


def is_held_out(text: str) -> bool:
    return zlib.crc32(text.lower().encode()) % 10 == 0


def random_word(rng: random.Random, most: int = MOST_LETTERS, split: Split = "train", least: int = 1) -> str:
    """A word or number of `least` to `most` letters; never one of the held-out ones in "train", always else."""
    while True:
        text = _random_text(rng, rng.randint(least, max(least, most)))
        if is_held_out(text) == (split != "train"):
            return text


def random_words(rng: random.Random, most: int = MOST_LETTERS, split: Split = "train") -> list[str]:
    """What stands on a sign: mostly one word, now and then two or three below each other, all different."""
    count = rng.choices((1, 2, 3), (6, 2, 1))[0]
    found: list[str] = []
    while len(found) < count:
        text = random_word(rng, most, split)
        if text not in found:
            found.append(text)
    return found


def _random_text(rng: random.Random, length: int) -> str:
    kind = rng.random()
    if kind < 0.3:
        return "".join(rng.choices(string.digits, k=length))
    if kind < 0.4:
        return "".join(rng.choices(string.ascii_uppercase + string.digits, k=length))
    case = rng.choice(_CASES)
    if kind < 0.65:
        return case("".join(rng.choices(string.ascii_lowercase, k=length)))
    return case(_pronounceable(rng, length))


def made_up(rng: random.Random) -> str:
    """A word in small letters that can be said, and that hardly anybody has used.

    Half are built as English words are, so that they fall into as many kinds of tokens.
    """
    if rng.random() < 0.5:
        return _pronounceable(rng, rng.randint(3, 7))
    syllables = (rng.choice(_ONSETS) + rng.choice(_MIDDLES) + rng.choice(_CODAS) for _ in range(rng.randint(1, 2)))
    return "".join(syllables) + rng.choice(_ENDINGS)


def _pronounceable(rng: random.Random, length: int) -> str:
    first = rng.randrange(2)
    return "".join(rng.choice((_VOWELS, _CONSONANTS)[(first + i) % 2]) for i in range(length))
