"""English as people type it: questions from templates with choices, loosened; and the words that answers are made of.

A template has choices in brackets, nested where needed ("[What|Which] [color|colour] is the {name}?"), and slots in
braces. Of every tuple of four or more templates the last one in five is held out: training never asks that way, and
the evaluation asks in no other. Every word of a held-out template stands in some other one, since nobody who learns
English from these alone can know another: questions of foreign words are in `typed.py`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from training.scenes import Item, Split

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_CONTRACTIONS = (
    ("What is ", "What's "), ("Where is ", "Where's "), ("Who is ", "Who's "), ("There is ", "There's "),
    ("what is ", "what's "), ("where is ", "where's "), ("I am ", "I'm "), (" do not ", " don't "),
    (" does not ", " doesn't "), (" is not ", " isn't "), ("Can not ", "Can't "), ("How is ", "How's "),
)  # fmt: skip
_BEFORE = (
    "Please tell me: ", "Tell me, ", "Can you tell me: ", "Hey, ", "Hi! ", "OK, ", "So, ", "And ", "Quick question: ",
    "Could you tell me this: ", "Now: ", "Hmm, ", "Please: ", "One more thing: ", "Look closely. ",
)  # fmt: skip
_AFTER = (", please", " please", ", do you know", " now", ", can you see", " exactly", " here", " pls",
          " plz", " thx", " tho"," lol", " rn", " right now", " for me", " then")  # fmt: skip
_TYPED_BEFORE = (
    "um ",
    "uh ",
    "ok so ",
    "yo ",
    "well ",
    "btw ",
    "so ",
    "hmm ",
    "alright ",
    "hey ",
    "ok ",
    "and ",
    "also ",
)
# In a chat, where a word is a letter; of whole words, and never of what a slot holds.
_SHORT = {
    "you": "u", "are": "r", "your": "ur", "please": "pls", "what is": "whats", "where is": "wheres", "who is": "whos",
    "there is": "theres", "how is": "hows", "give me": "gimme", "let me": "lemme", "do you see": "u see", "them": "em",
    "want to": "wanna", "picture": "pic", "isn't": "isnt", "doesn't": "doesnt", "don't": "dont", "what's": "wats",
    "where's": "wheres", "what": "wat", "do you": "do ya",
    "because": "cuz", "image": "img",
}  # fmt: skip
# What people leave out: the beginning of a question, and what it ends with.
_LEFT_OUT = (
    (r"^(Is|Are) there (an? |any )?", "any "), (r"^Do you see ", "see "), (r"^What is the ", "the "),
    (r"^What is the ", ""), (r"^(Can|Could) you ", ""), (r"^Tell me ", ""),
    (r"^(How many .+) (are there|do you see)\b", r"\1"),
    (r"^What do you see ", "what "), (r"^(Is|Does) ", ""), (r"^I (need|want|would like) ", ""), (r"\b(the|an?) ", ""),
    (r"^Where is ", "where "), (r"^Are ", ""),
)  # fmt: skip
_DIGITS = {number: str(index) for index, number in enumerate(NUMBERS) if index > 1}
_TYPED_AS = {"the": "teh", "what": "waht", "shape": "shpae", "color": "colr", "colour": "coulour", "there": "ther",
             "where": "were", "picture": "pic", "image": "img", "are": "r", "you": "u", "many": "mnay",
             "please": "pls", "which": "wich", "is": "si", "square": "sqare", "triangle": "triangel"}  # fmt: skip


def split_templates(templates: Sequence[str], split: Split) -> Sequence[str]:
    """Those of a tuple that this split asks with."""
    held_out = len(templates) // 5 if len(templates) >= 5 else int(len(templates) >= 4)
    if not held_out:
        return templates
    return templates[:-held_out] if split == "train" else templates[-held_out:]


def ask(rng: random.Random, templates: Sequence[str], split: Split, **slots: object) -> str:
    """A question from one of this split's templates, its choices made, its slots filled, and loosened."""
    return loosened(rng, filled(rng, rng.choice(split_templates(templates, split)), **slots))


def filled(rng: random.Random, template: str, **slots: object) -> str:
    """The template with its choices made, innermost first, and its slots filled."""
    while "[" in template:
        template = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), template)
    text = template.format(**slots) if slots else template
    text = text.replace("  ", " ").replace(" ?", "?").replace(" .", ".").strip()
    return text[0].upper() + text[1:]


def loosened(rng: random.Random, text: str) -> str:
    """The text as people type it: contracted, politely, without capitals or marks, with a slip of the fingers."""
    if rng.random() < 0.12 and text[-1] == "?":
        pattern, left = rng.choice(_LEFT_OUT)
        shorter = re.sub(pattern, left, text)
        text = shorter if len(shorter.split()) > 1 else text
    if rng.random() < 0.35:
        mark = "'" if rng.random() < 0.75 else ""
        for full, short in _CONTRACTIONS:
            text = text.replace(full, short.replace("'", mark))
    draw = rng.random()
    if draw < 0.1:
        text = rng.choice(_BEFORE) + text[0].lower() + text[1:]
    elif draw < 0.16 and text[-1] in ".?":
        text = text[:-1] + rng.choice(_AFTER) + text[-1]
    draw = rng.random()
    if draw < 0.14:
        text = text.rstrip(".?!")
    elif draw < 0.24:
        text = text[0].lower() + text[1:]
    elif draw < 0.42:
        text = text.lower().rstrip(".?!")
    elif draw < 0.45:
        text = text.upper()
    if rng.random() < 0.08:
        text = _shortened(rng, text)
    if rng.random() < 0.06:
        text = slipped(rng, text)
    return text


def _shortened(rng: random.Random, text: str) -> str:
    """The text as it is typed in a hurry: some words short, numbers as digits, more or fewer marks at its end."""
    for long, short in rng.sample([*(_SHORT | _DIGITS).items()], 12):
        text = re.sub(rf"\b{long}\b", short, text, flags=re.IGNORECASE)
    if rng.random() < 0.3:
        text = rng.choice(_TYPED_BEFORE) + text[0].lower() + text[1:]
    return text.rstrip(".?!") + rng.choice(("", "", "?", "??", "?!", "..."))


def slipped(rng: random.Random, text: str) -> str:
    """The text with one word mistyped: as people often do, or two neighbouring letters exchanged, or one lost."""
    words = text.split(" ")
    known = [i for i, word in enumerate(words) if word.strip("?.,!").lower() in _TYPED_AS]
    if known and rng.random() < 0.6:
        index = rng.choice(known)
        bare = words[index].strip("?.,!")
        words[index] = words[index].replace(bare, _TYPED_AS[bare.lower()])
        return " ".join(words)
    long = [i for i, word in enumerate(words) if len(word) > 4 and word.isalpha()]
    if not long:
        return text
    index = rng.choice(long)
    word, at = words[index], rng.randrange(1, len(words[index]) - 2)
    swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    words[index] = swapped if rng.random() < 0.6 else word[:at] + word[at + 1 :]
    return " ".join(words)


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def a(noun: str) -> str:
    """'a red circle', 'an orange star'."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def plural(noun: str) -> str:
    """'circles', 'crosses', 'red shapes'."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def listed(parts: Sequence[str]) -> str:
    """'a, b, c': an "and" would have to be known two parts ahead, which is where captions failed."""
    return ", ".join(parts)


def at(place: str) -> str:
    """'at the top left', 'on the left', 'in the center'."""
    preposition = {"left": "on the", "right": "on the", "center": "in the"}.get(place, "at the")
    return f"{preposition} {place}"


def there_are(count: int, noun: str) -> str:
    """'There is one shape.', 'There are no stars.'"""
    return f"There {'is' if count == 1 else 'are'} {NUMBERS[count]} {noun if count == 1 else plural(noun)}."


def sized(item: Item) -> str:
    """'big red circle', 'red circle' (of middling size)."""
    return f"{item.size} {item.name}".strip()
