"""Made-up words and numbers for signs, so that no list of words helps.

Training never used these: one word in ten is held out by its checksum.
"""

from __future__ import annotations

import random
import string
import zlib

MOST_LETTERS = 8
_VOWELS = "aeiou"
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_ONSETS = ("b", "bl", "br", "c", "ch", "cl", "d", "dr", "f", "fl", "g", "gr", "h", "j", "l", "m", "n", "p", "pl", "pr",
           "r", "s", "sh", "sp", "st", "str", "t", "th", "tr", "v", "w", "")  # fmt: skip
_MIDDLES = ("a", "e", "i", "o", "u", "ai", "ea", "ee", "oo", "ou")
_CODAS = ("", "", "b", "ck", "d", "g", "l", "m", "n", "nd", "ng", "p", "r", "rt", "s", "st", "t", "x")
_ENDINGS = ("", "", "", "er", "ity", "tion", "ing", "al", "ment", "ness", "age", "ure", "y", "ance", "ic", "ful")
_CASES = (str.upper, str.lower, str.capitalize)


def random_words(rng: random.Random, most: int = MOST_LETTERS) -> list[str]:
    """One to three different held-out words of up to `most` letters, mostly one."""
    count = rng.choices((1, 2, 3), (6, 2, 1))[0]
    found: list[str] = []
    while len(found) < count:
        text = _random_text(rng, rng.randint(1, most))
        if zlib.crc32(text.lower().encode()) % 10 == 0 and text not in found:
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
    """A new word in lower case. Half of them are built like English words."""
    if rng.random() < 0.5:
        return _pronounceable(rng, rng.randint(3, 7))
    syllables = (rng.choice(_ONSETS) + rng.choice(_MIDDLES) + rng.choice(_CODAS) for _ in range(rng.randint(1, 2)))
    return "".join(syllables) + rng.choice(_ENDINGS)


def _pronounceable(rng: random.Random, length: int) -> str:
    first = rng.randrange(2)
    return "".join(rng.choice((_VOWELS, _CONSONANTS)[(first + i) % 2]) for i in range(length))
