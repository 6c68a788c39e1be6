"""Required and forbidden words of captions."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

from qwen35mm.errors import CaptioningError

_PATTERN = "re:"

# Scripts without spaces between words, and Korean, whose particles are attached to words.
_UNSPACED = (
    ("\u0e00", "\u0eff"),  # Thai, Lao
    ("\u1000", "\u109f"),  # Burmese
    ("\u1780", "\u17ff"),  # Khmer
    ("\u1100", "\u11ff"),  # Hangul, in parts
    ("\u3040", "\u30ff"),  # Hiragana, Katakana
    ("\u3400", "\u9fff"),  # Chinese characters
    ("\uac00", "\ud7af"),  # Hangul
    ("\uf900", "\ufaff"),  # Chinese characters, compatibility
    ("\U00020000", "\U0003ffff"),  # Chinese characters, rare
)


@dataclass(frozen=True)
class Words:
    """The words that a caption is checked for.

    A word or phrase matches whole words and ignores case: `cat` is in `Cat!` but not in `category`. In Chinese,
    Japanese, Korean, Thai and other scripts without spaces, it matches anywhere. `re:PATTERN` searches for a regular
    expression and ignores case. Patterns are trusted: one that backtracks endlessly stops the run, so don't use other
    people's patterns.

    Raises:
        CaptioningError: an empty word, an invalid pattern, or a word that is both required and forbidden.
    """

    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for word in (*self.required, *self.forbidden):
            if not word.removeprefix(_PATTERN).strip():
                raise CaptioningError(
                    f"A required or forbidden word is empty: {word!r}. Give it a text, or leave it out."
                )
            if word.startswith(_PATTERN):
                _compiled(word)
        forbidden = {_folded(word) for word in self.forbidden}
        if both := [word for word in self.required if _folded(word) in forbidden]:
            raise CaptioningError(f"{both[0]!r} is both required and forbidden. Leave it out of one of them.")

    def problems(self, text: str) -> tuple[str, ...]:
        """A caption's problems: `missing: WORD` and `forbidden: WORD`, with the words as given."""
        missing = [f"missing: {word}" for word in self.required if not contains(text, word)]
        present = [f"forbidden: {word}" for word in self.forbidden if contains(text, word)]
        return (*missing, *present)


def contains(text: str, word: str) -> bool:
    """Whether a text contains a word, as in `Words`.

    Raises:
        CaptioningError: an invalid pattern.
    """
    if word.startswith(_PATTERN):
        return _compiled(word).search(unicodedata.normalize("NFC", text)) is not None
    folded, sought = _folded(text), _folded(word)
    at = folded.find(sought)
    while at >= 0:
        if _parts(folded, at) and _parts(folded, at + len(sought)):
            return True
        at = folded.find(sought, at + 1)
    return False


@lru_cache(maxsize=1024)
def _compiled(word: str) -> re.Pattern[str]:
    pattern = unicodedata.normalize("NFC", word.removeprefix(_PATTERN))
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise CaptioningError(f"{pattern!r} isn't a valid regular expression: {error}.") from error


def _folded(text: str) -> str:
    """Removes differences of case, Unicode form, apostrophes and white space."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.replace("’", "'").split())


def _parts(text: str, at: int) -> bool:
    """Whether a word can begin or end at an offset."""
    if at in (0, len(text)):
        return True
    before, after = text[at - 1], text[at]
    return not (_is_of_a_word(before) and _is_of_a_word(after)) or _is_unspaced(before) or _is_unspaced(after)


def _is_of_a_word(char: str) -> bool:
    # Marks too: in many scripts, vowels are marks.
    return char == "_" or unicodedata.category(char)[0] in "LMN"


def _is_unspaced(char: str) -> bool:
    return any(first <= char <= last for first, last in _UNSPACED)
