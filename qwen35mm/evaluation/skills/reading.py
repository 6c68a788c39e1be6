"""Words and numbers on signs, which training never showed; spelled letter by letter in the answer."""

from __future__ import annotations

import random
from dataclasses import replace

from qwen35mm.evaluation import scenes, words
from qwen35mm.evaluation.drawing import NUM_ALL_FONTS, NUM_FONTS
from qwen35mm.evaluation.language import NUMBERS, ask, listed
from qwen35mm.evaluation.scenes import Item, Picture, Split
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, conversation, image
from training.data import END_SPELL, SPELL

READ = (
    "Read it.", "Read [that|this].", "[Read|Say|Copy|Type|Decipher] [the letters|the sign|the text|all text|it].",
    "[Word|Words|Letters]?", "[What|Which] [text|letters]?", "It says what?", "The sign says what?",
    "Says what?", "What does it read?", "What does that say?",
    "[The text|The word|The words|The letters|The writing][, please|]?", "And this sign?",
    "What does [it|the sign|the picture|this] say?",
    "What is written [here|there|in the picture|on it|on the sign]?",
    "[Read|Say|Write down] [the text|it|the word|this|what it says].",
    "[What|Which] [word|text] [is this|is it|do you see|is in the picture]?",
    "[Which|What] [letters|words] [are there|do you see|are written there]?",
    "[Transcribe|Read out] [the text|the picture].",
    "What can you read [here|in it|]?",
    "What [do you see|is in the picture|is this]?",
    "Describe the [picture|image].",
    "[Spell out|Spell|OCR] the [text|word].",
    "What text [appears|is shown] [here|in the image]?",
    "[Can|Could] you read [it|this|the sign|the text][ to me|]?",
    "Tell me what [it says|is written here|the sign says].",
    "The text[, please|]?",
    "Which [text|word] can you [read|see] [here|]?",
    "Tell me what you can read.",
    "[Can|Could] you [transcribe|spell out] [it|the word]?",
    "What [word|text] is written [there|on the sign]?",
    "And what does it say?", "The sign reads what?", "Read out what you see.",
)  # fmt: skip
COLOR = (
    "Text [color|colour]?", "Font [color|colour]?", "[color|colour] of the [letters|text|word]?",
    "The text is [what|which] [color|colour]?", "The writing is [what|which] [color|colour]?",
    "And the [color|colour] of the text?", "Letter [color|colour]?",
    "[What|Which] [color|colour] is [the text|the word|the writing|it]?",
    "What is the [color|colour] of the [text|word|writing]?",
    "In [what|which] [color|colour] [is it|is the text|is the word|was it] written?",
    "[What|Which] [color|colour] [do the letters have|are the letters|are these letters|is the writing in]?",
    "Which [color|colour] is used for the [text|word]?",
    "Tell me the [color|colour] of the [text|word|letters].",
    "[What|Which] [color|colour] does the [text|word|writing] have?",
    "What is the [color|colour] of the letters?",
    "In [what|which] [color|colour] are the letters written?",
    "And [what|which] [color|colour] is the text?", "The [color|colour] of the [letters|word]?",
)  # fmt: skip
HOW_MANY = (
    "How many words in there?", "Number of words?", "Word count?", "Words, how many?", "And how many words?",
    "How many words in all?",
    "How many words are [there|in the picture|on it]?",
    "How many words [do you see|can you read]?",
    "Count the words.",
    "What is the number of words?",
    "[Tell me|Say] how many words there are.",
    "[Can|Could] you count the words?",
    "Say how many words you [see|can read].",
    "And how many words do you see?", "The number of words?",
)  # fmt: skip


def read_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    said = listed([f'"{SPELL}{word.text}{END_SPELL}"' for word in picture.words])
    return Turn("reading", ask(rng, READ, split), f"It says {said}.", grade="letters")


def text_color_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn | None:
    word, *more = picture.words
    return None if more else Turn("text color", ask(rng, COLOR, split), f"It is {word.color}.")


def num_words_turn(rng: random.Random, picture: Picture, split: Split, about: Item | None = None) -> Turn:
    count = len(picture.words)
    answer = f"There {'is' if count == 1 else 'are'} {NUMBERS[count]} word{'s' * (count > 1)}."
    return Turn("number of words", ask(rng, HOW_MANY, split), answer)


def random_sign(
    rng: random.Random,
    split: Split,
    most: int = words.MOST_LETTERS,
    lines: int | None = None,
    size: tuple[int, int] | None = None,
) -> Picture:
    """A sign of one to three words; in "combos" in fonts that training never saw, and outside "train" of new words."""
    texts = words.random_words(rng, most, split)[:lines]
    sign = scenes.random_sign(rng, size or scenes.random_size(rng), texts, NUM_FONTS)
    if split == "combos":
        font = rng.randrange(NUM_FONTS, NUM_ALL_FONTS)
        held_out = tuple(replace(word, font=font) for word in sign.words)
        return replace(sign, words=held_out)
    return sign


def _sample(most: int, lines: int | None = None):
    def sample(rng: random.Random, split: Split) -> Sample:
        sign = random_sign(rng, split, most, lines)
        return conversation(rng, [read_turn(rng, sign, split)], [image(sign)])

    return sample


def _color_sample(rng: random.Random, split: Split) -> Sample:
    sign = random_sign(rng, split, lines=1)
    turn = text_color_turn(rng, sign, split)
    assert turn is not None
    return conversation(rng, [turn], [image(sign)])


TURNS = {"reading": read_turn, "text color": text_color_turn, "number of words": num_words_turn}
SKILLS = (
    Skill("reading up to 5", _sample(5, 1), 92),
    Skill("reading up to 8", _sample(8), 92),
    Skill("text color", _color_sample),
)
