"""English as people type it: questions from templates, loosened, and the phrases of answers.

A template has choices in brackets, nested if needed ("[What|Which] [color|colour] is the {name}?"), and slots in
braces. These templates are the last fifth of each list; training used the other four.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from qwen35mm.evaluation.scenes import Item

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_CONTRACTIONS = (
    ("What is ", "What's "), ("Where is ", "Where's "), ("Who is ", "Who's "), ("There is ", "There's "),
    ("what is ", "what's "), ("where is ", "where's "), ("I am ", "I'm "), (" do not ", " don't "),
    (" does not ", " doesn't "), (" is not ", " isn't "), ("Can not ", "Can't "), ("How is ", "How's "),
)  # fmt: skip
_BEFORE = (
    "Please tell me: ", "Tell me, ", "Can you tell me: ", "Hey, ", "Hi! ", "Ok, ", "So, ", "And ", "Quick question: ",
    "Could you tell me this: ", "Now: ", "Hmm, ", "Please: ", "One more thing: ", "Look closely. ",
)  # fmt: skip
_AFTER = (", please", " please", ", do you know", " now", ", can you see", " exactly", " here")
# What people type in a chat before and after a question, and how they shorten words.
_TYPED_BEFORE = (
    "um ", "uh ", "um so ", "ok so ", "ok ", "okay ", "yo ", "well ", "btw ", "so ", "hmm ", "alright ", "hey ",
    "hey there ", "and ", "also ", "lol ", "hi ", "now ", "pls ", "quick one: ", "wait, ", "oh and ",
)  # fmt: skip
_TYPED_AFTER = (" pls", " plz", " please", " thx", " thanks", " tho", " lol", " rn", " right now", " then", " ok")
_TYPED_ENDS = ("", "", "", "", "?", "?", "??", "???", "!?", "?!", "...", " ?")
# Whole words, replaced in lower case or at the beginning, so that names stay.
_SHORT = {
    "what is": ("whats", "wats", "what", "wat is"), "what are": ("what r", "wat r"), "where is": ("wheres", "where"),
    "who is": ("whos",), "there is": ("theres",), "how is": ("hows",), "that is": ("thats",), "when is": ("whens",),
    "it is": ("its",), "is not": ("isnt",), "isn't": ("isnt",), "are not": ("arent",), "do not": ("dont",),
    "don't": ("dont",), "does not": ("doesnt",), "doesn't": ("doesnt",), "can not": ("cant",), "did not": ("didnt",),
    "i am": ("im",), "i'm": ("im",), "i would like": ("id like", "i want"), "give me": ("gimme",),
    "let me": ("lemme",), "want to": ("wanna",), "going to": ("gonna",),
    "do you": ("do u", "do ya", "d u", "u"), "can you": ("can u", "can ya"), "could you": ("could u", "cud u"),
    "are you": ("r u",), "you": ("u",), "your": ("ur",), "are": ("r",), "them": ("em",),
    "please": ("pls", "plz"), "thank you": ("ty", "thank u", "thx"), "thanks": ("thx", "thnx"), "and": ("n", "&"),
    "what": ("wat", "wut"), "which": ("wich",), "picture": ("pic",), "pictures": ("pics",), "image": ("img",),
    "people": ("ppl",), "right now": ("rn",), "with": ("w",), "about": ("abt",), "background": ("bg",),
    "between": ("btwn",), "because": ("cuz",), "something": ("smth",),
    "color": ("clr",), "number of": ("no. of",), "remember": ("rmbr", "remember"),
}  # fmt: skip
# (pattern, replacement) for questions. Statements are never shortened: their words are facts.
_LEFT_OUT = (
    (r"^(Is|Are) there (an? |any )", "any "), (r"^(Is|Are) there (an? |any )", r"\1 there "),
    (r"^(Do|Can) you see ", "you see "), (r"^(Do|Can) you see ", "see "), (r"^What do you see ", "what you see "),
    (r"^What is the (?=\w+ (of|in|from|between) )", ""), (r"^What is the (?=\w+ (of|in|from|between) )", "the "),
    (r"^What is (?=the )", "what "), (r"^Where is (?=the |my )", "where "), (r"^Where is the ", "where "),
    (r"^Where is the ", "where is "), (r"^Is (?=the |my |it )", ""), (r"^Does (?=the |it )", ""), (r"^Is the ", "is "),
    (r"^(Can|Could) you (?!see)", ""), (r"^Tell me (?=the|what|which|where|how|when)", ""),
    (r"^(How many .+?) (are there|do you see|can you see|are in it)\?$", r"\1?"),
    (r"^(What|Which) (colou?r) is (?=the |my )", r"\2 of "), (r"^(What|Which) (colou?r) is the ", r"\1 \2 is "),
    (r"^(What|Which) (colou?r) is (?=the )", r"\1 \2 "), (r"\bof the ", "of "), (r"\bthe (?!same)", ""),
    (r"\bThe (?!same)", ""), (r" (on|at|in) the (?=left|right|top|bottom|center)", " "),
    (r"\b(my \w+)'s\b", r"\1s"),
)  # fmt: skip
_YES_OR_NO = re.compile(r"(is|are|do|does|can you see|did) ", re.IGNORECASE)
# Nothing is put before these beginnings, or before a number to repeat.
_OPENED = re.compile(r"(and|so|now|then|also|ok|okay|hi|hey|hello|good|well|what about|how about)\b|\d", re.IGNORECASE)
_DIGITS = {number: str(index) for index, number in enumerate(NUMBERS) if index > 1}
_COPIED = re.compile(r"\d\W*$")  # nothing may follow words to repeat
_TYPED_AS = {"the": "teh", "what": "waht", "shape": "shpae", "color": "colr", "colour": "coulour", "there": "ther",
             "where": "were", "picture": "pic", "image": "img", "are": "r", "you": "u", "many": "mnay",
             "please": "pls", "which": "wich", "is": "si", "square": "sqare", "triangle": "triangel"}  # fmt: skip


def ask(rng: random.Random, templates: Sequence[str], **slots: object) -> str:
    """A question from one of the templates: choices made, slots filled, loosened."""
    return loosened(rng, filled(rng, rng.choice(templates), **slots))


def filled(rng: random.Random, template: str, **slots: object) -> str:
    """The template with its choices made, innermost first, and its slots filled."""
    while "[" in template:
        template = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), template)
    text = template.format(**slots) if slots else template
    text = text.replace("  ", " ").replace(" ?", "?").replace(" .", ".").strip()
    return text[0].upper() + text[1:]


def loosened(rng: random.Random, text: str) -> str:
    """The text as people type it: contracted, polite, without capitals or punctuation, in a hurry, or with a typo.

    Names and numbers stay, since answers copy them.
    """
    if rng.random() < 0.25:
        return _hurried(rng, text)
    if rng.random() < 0.35:
        mark = "'" if rng.random() < 0.75 else ""
        for full, short in _CONTRACTIONS:
            text = text.replace(full, short.replace("'", mark))
    if rng.random() < 0.1:
        text = _digits(text)
    draw = rng.random()
    if draw < 0.1 and not _OPENED.match(text):
        text = rng.choice(_BEFORE) + text[0].lower() + text[1:]
    elif draw < 0.16 and text[-1] in ".?" and not _COPIED.search(text):
        text = text[:-1] + rng.choice(_AFTER) + text[-1]
    if rng.random() < 0.05:
        text = slipped(rng, text)
    draw = rng.random()
    if draw < 0.14:
        text = text.rstrip(".?!")
    elif draw < 0.24:
        text = text[0].lower() + text[1:]
    elif draw < 0.42:
        text = text.lower().rstrip(".?!")
    elif draw < 0.45:
        text = text.upper()
    return text


def _hurried(rng: random.Random, text: str) -> str:
    """The text as typed into a chat: shortened and mostly in lower case."""
    fixed = _COPIED.search(text) is not None
    if rng.random() < 0.5 and (text[-1] == "?" or text.startswith("Tell me ")):
        text = _elided(rng, text)
    if rng.random() < 0.6:
        for long in _SHORT:
            if rng.random() < 0.5:
                text = _whole(long, rng.choice(_SHORT[long]), text)
    if rng.random() < 0.6:
        text = _digits(text)
    if rng.random() < 0.12:
        text = slipped(rng, text)
    if rng.random() < 0.75:
        text = text.lower()
    end = text[-1] if text[-1] in ".?!" else ""
    text = text.rstrip(".?!")
    draw = rng.random()
    if draw < 0.22 and not _OPENED.match(text):
        first = text if text[:2].isupper() else text[0].lower() + text[1:]
        text = rng.choice(_TYPED_BEFORE) + first
    elif draw < 0.4 and not fixed:
        either = end == "?" and _YES_OR_NO.match(text) and " or " not in text
        ends = (*_TYPED_AFTER, " or not", " or not") if either else _TYPED_AFTER
        text += rng.choice(ends)
    return text + rng.choice(("", end) if fixed or end != "?" else _TYPED_ENDS)


def _elided(rng: random.Random, text: str) -> str:
    """The question without some words. At least two words stay."""
    shorter = [re.sub(pattern, left, text) for pattern, left in _LEFT_OUT]
    shorter = [each for each in shorter if each != text and len(each.split()) > 1]
    return rng.choice(shorter) if shorter else text


def _digits(text: str) -> str:
    for word, digit in _DIGITS.items():
        text = _whole(word, digit, text)
    return text


def _whole(long: str, short: str, text: str) -> str:
    """The text with `long` replaced where it is a whole word in lower case or at the beginning."""
    if long not in text.lower():  # much faster than the expression below
        return text

    def replaced(match: re.Match[str]) -> str:
        return short if match[0].islower() or match.start() == 0 or long[:2] in ("i ", "i'") else match[0]

    return re.sub(rf"(?<![\w'\"]){long}(?![\w'\"])", replaced, text, flags=re.IGNORECASE)


def slipped(rng: random.Random, text: str) -> str:
    """The text with one word mistyped: a common typo, two letters swapped, or one letter missing."""
    words = text.split(" ")
    known = [i for i, word in enumerate(words) if (word.islower() or not i) and _bare(word).lower() in _TYPED_AS]
    if known and rng.random() < 0.6:
        index = rng.choice(known)
        bare = _bare(words[index])
        words[index] = words[index].replace(bare, _TYPED_AS[bare.lower()])
        return " ".join(words)
    long = [i for i, word in enumerate(words) if len(word) > 4 and word.islower() and word.isalpha()]
    long = [i for i in long if words[i] not in ("there", "three")]  # a typo turns one into the other
    if not long:
        return text
    index = rng.choice(long)
    word, at = words[index], rng.randrange(1, len(words[index]) - 2)
    swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    words[index] = swapped if rng.random() < 0.6 else word[:at] + word[at + 1 :]
    return " ".join(words)


def _bare(word: str) -> str:
    return word.strip("?.,!")


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def a(noun: str) -> str:
    """'a red circle', 'an orange star'."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def plural(noun: str) -> str:
    """'circles', 'crosses', 'red shapes'."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def at(place: str) -> str:
    """'at the top left', 'on the left', 'in the center'."""
    preposition = {"left": "on the", "right": "on the", "center": "in the"}.get(place, "at the")
    return f"{preposition} {place}"


def there_are(count: int, noun: str) -> str:
    """'There is one shape.', 'There are no stars.'"""
    return f"There {'is' if count == 1 else 'are'} {NUMBERS[count]} {noun if count == 1 else plural(noun)}."


def sized(item: Item) -> str:
    """'big red circle', 'red circle'."""
    return f"{item.size} {item.name}".strip()
