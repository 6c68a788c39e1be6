"""Small talk, questions about a picture that was never sent, and questions about the rest of the world."""

from __future__ import annotations

import random
from collections.abc import Callable

from qwen35mm.evaluation import words
from qwen35mm.evaluation.language import ask, at, plural
from qwen35mm.evaluation.scenes import ALL_PLACES, COLORS, SHAPES, Split
from qwen35mm.evaluation.skills import describing
from qwen35mm.evaluation.skills.base import Sample, Skill, Turn, conversation

CANT_TELL = "I can't tell. I only know simple shapes, short words in pictures, and what you tell me."
NO_MEDIA = "Please send a picture or a video first."
WHO = "I am the small demo model of qwen35mm, made for testing."
WHAT = "I can describe pictures and short clips of simple shapes, read short words, and remember what you tell me."
_SMALL_TALK = (
    (("[Sup|Yo|Hiya|Howdy|Heyy|Heya|Hello again|Hey you][!|]", "[Morning|Evening|Gm|Good day][!|]",
      "[What is up|Wassup|How is it going|How are things|How do you do]?", "[Hi|Hello|Hey] [again|friend|bot][!|]",
      "[Anybody|Anyone] [there|here]?", "[Hello|Hey], [anybody|anyone] there?", "[Hello|Hi]?",
      "[Hello|Hi|Hey|Hi there|Hey there|Hello there][!|.|]", "Good [morning|evening|afternoon|day][!|]",
      "[Hello|Hi|Hey], how are you[ doing|]?", "How are you[ today|]?", "Greetings!", "[Yo|Hiya|Howdy][!|]",
      "[Hello|Hi] and good [morning|evening|day][!|]", "[Hello|Hey], how is it going?",
      "Good morning, how are you?"),
     f"Hello! {WHAT}"),
    (("Your name?", "[Which|What] [AI|bot] [is this|are you]?", "Who am I [talking|speaking] to?",
      "[You are|So you are] [a robot|an AI|human], right?", "[And who|Who|So who] are you[ then|]?", "Are you a bot?",
      "Do you have a name?", "Who [built|created|trained] you?",
      "Who are you?", "What are you?", "What is your name?", "Which model is this?", "Are you a real model?",
      "[Are you|Is this] [ChatGPT|Qwen|a robot|an AI|human]?", "Who made you?", "Introduce yourself.",
      "Tell me who you are.", "What model are you?", "Tell me your name.", "So which model are you?"), WHO),
    (("[What should I ask|What is this for|What now|Ideas|Features]?", "[Which|What] questions can you answer?",
      "What do you do?", "What all can you do?", "So what can you do?", "Show me what you can do.",
      "How do I use [this|it|you]?", "How do you work?", "[I need|Need] help.", "Can you help me?", "Your skills?",
      "What can you do?", "Help[!|]", "How can you help me?", "What [things |]do you know[ about|]?",
      "What can I ask you?", "How does this work?", "What are you able to do?", "Can you see [pictures|images|videos]?",
      "What should I ask?", "Which things can you do?", "What are you good at?",
      "Tell me what you can do.", "Which things do you know?", "Tell me what I can ask you.",
      "Tell me how you work.", "What are your skills?", "So what do you know?"), WHAT),
    (("[Thx|Thank u|Many thanks|Thanks a bunch|Thanks so much|Tysm][!|]", "[Nice one|Great stuff|Good one|Love it][!|]",
      "[Lol|Haha|Lol nice|Haha thanks|Hahaha]", "[Ok|K|Okay|Ok cool|Alright][, thanks|]", "[Wow|Amazing|Brilliant][!|]",
      "That helps[!|.|]", "[That was|This is] [good|great|nice|right][!|]", "[Got it|I see][, thanks|]",
      "Thanks[!|]", "Thank you[ very much|!|.]", "[Great|Cool|Nice|OK], [thanks|thank you][!|]", "Well done!",
      "[Good job|Nice work|Perfect|Awesome|Great][!|]", "Thx", "Ty", "[Correct|That is right|Right][!|.]",
      "Cheers[!|]", "[Very good|Very nice|Good][!|]", "Great, well done!",
      "Very nice, thank you!", "Great work, thanks!", "That was very nice!"), "You are welcome."),
    (("[Later|Bye for now|Take care|So long|Talk later|Bye then][!|]",
      "[I am off|I am out|Gotta go|Got to go][!|.]",
      "[See you|Talk to you] [tomorrow|soon|then][!|]",
      "That is all[, bye|for today|, goodbye].", "[Night|Gn|Good night all][!|]",
      "[Bye|Goodbye|Bye bye|Good bye][, and thanks|, thanks|][!|.|]", "See you[ later|]!",
      "[Good night|Have a nice day][!|.]", "I have to go now.", "Farewell!", "Good bye and thank you!",
      "Have a good night!"), "Goodbye!"),
)  # fmt: skip
_OFF_TOPIC = (
    "{thing}?", "[Tell me|Something] about {thing}.", "Weather in {place}?",
    "[How is the weather|Weather] today?",
    "[What time is it|What is the time|What day is it|What is the date]?", "{number} [plus|times|minus] {number}?",
    "{number}[+| + |x| * |-]{number}?", "Capital of {place}?", "Time in {place}?",
    "[Tell me a|Know a|Any] [joke|story]?", "[Write|Sing] me a [song|poem|story].",
    "Who won the [game|match|race|election]?", "[News|Any news] from {place}?", "Price of {thing}?",
    "[Do you like|You like] {thing}?", "What is {thing}?", "Who is {thing}?", "Best [food|hotel|film] in {place}?",
    "[How old are you|Are you happy|Where do you live|Do you love me]?",
    "[What should I|What can I] [eat|cook|wear|read] [today|tonight]?", "What is {number}% of {number}?",
    "[Solve|Compute] {number} + {number}.", "Is {place} [big|far|nice|cold]?",
    "[What is|Name] the capital of {place}?",
    "Who [wrote|invented|discovered|made|is] {thing}?",
    "Tell me [a story|a joke|something|a fact] about {thing}.",
    "How [old|tall|heavy|fast] is {thing}?",
    "Write a [poem|song|short story|letter] about {thing}.",
    "What is the weather [like |]in {place}?",
    "Why is {thing} so [famous|important|expensive]?",
    "[Explain|Describe] {thing} to me.",
    "Translate {thing} into [French|German|Spanish|Chinese].",
    "How do I [learn|cook|repair|buy|clean|make] {thing}?",
    "What is {number} [plus|times|minus|divided by] {number}?",
    "[Can you |]write [code|a program|Python code] for {thing}?",
    "[Give me|I need] a recipe [with|for] {thing}.",
    "What do you think [about|of] {thing}?",
    "How many people live in {place}?",
    "When did {thing} [begin|end|start]?",
    "[Do you like|Have you seen|Do you know] {thing}?",
    "Who is the [president|king|mayor] of {place}?",
    "What time is it in {place}?",
    "How far is it to {place}?",
    "Should I [buy|sell|eat|learn] {thing}?",
    "How much is {thing} worth?",
    "What is the [meaning|history|price] of {thing}?",
    "Recommend [a book|a film|a song] about {thing}.",
    "Where can I [buy|find|learn] {thing}?",
    "[Is|Was] {thing} [good|bad|dangerous|healthy|old]?",
    "How does {thing} work?",
    "Which is the [best|biggest|oldest] [city|river|museum] in {place}?",
    "What language do they speak in {place}?",
    "How do I get to {place}?",
    "What is {thing} made of?",
    "Do you know a joke about {thing}?",
    "Who is the best [president|king] of {place}?",
    "How old is the capital of {place}?",
    "Give me a [book|poem|song] about {thing}.",
    "How important is {thing}?",
    "What do people eat in {place}?",
    "Explain the [meaning|history] of {thing}.",
    "What is the best time to learn {thing}?",
    "What is the date in {place}?", "Compute {number} plus {number}.", "Do you know a good story?",
    "What do people like in {place}?", "Is the food in {place} good?",
    "What can I eat in {place}?",
)  # fmt: skip
REPEAT = (
    "[Say|Write|Type|Echo|Repeat] {said}", "[Say|Repeat|Write] this, {said}", "Say it: {said}", "Repeat: {said}",
    "After me: {said}", "[Say|Write] just {said}", "[Say|Type] the words {said}", "[Please |]say {said}.",
    "[I need you|I want you] to [type|echo]: {said}", "Your answer: {said}", "Repeat after me {said}",
    "[Say|Repeat|Echo|Write|Type][:|] {said}[.|]",
    'Say "{said}"[.|]',
    "Repeat after me: {said}[.|]",
    "[Say|Repeat] [this|these words|this text][:|] {said}[.|]",
    "[Answer|Reply] [with|only with|just with] {said}[.|]",
    "[Can|Could] you [say|repeat|write|type] {said}?",
    "I want you to [say|repeat|write] {said}.",
    "[Just say|Only say|Just write|Only write|Just type|Let your answer be|The answer is to be] {said}[.|]",
    "[Write|Type|I want] [the words|the text|this text][:|] {said}[.|]",
    "{said}. [Say|Repeat] that.",
    "[Repeat|Say] the words {said} after me.",
    "Can you type this text: {said}",
    "I want the answer {said}[.|]",
    "Just repeat {said}", "Echo the words {said}", "Say this after me: {said}",
)  # fmt: skip
_PLACES = (
    "France", "Japan", "London", "Paris", "New York", "Berlin", "Spain", "India", "China", "Brazil", "Rome", "Canada",
    "Egypt", "Tokyo", "Norway", "Peru", "Kenya", "Sydney", "Moscow", "Italy", "Chile", "Poland", "Madrid", "Vienna",
    "Oslo", "Cuba", "Texas", "Lisbon", "Athens", "Dublin", "Iran", "Ghana", "Prague", "Seoul", "Mexico",
)  # fmt: skip
_THINGS = (
    "Hamlet", "a dog", "the moon", "Python", "water", "history", "music", "football", "the ocean", "bread", "a train",
    "love", "a computer", "Shakespeare", "winter", "my friend", "quantum physics", "the president", "a cat", "chess",
    "Einstein", "tomato soup", "time", "the sun", "a car", "money", "the war", "a horse", "coffee", "the universe",
    "a bicycle", "the piano", "art", "the internet", "a rocket", "pizza", "happiness", "the queen", "my mother",
    "a house", "the telephone", "gold", "a guitar", "tea", "the Bible", "Harry Potter", "a phone", "the pyramids",
    "evolution", "gravity", "Mozart", "an elephant", "the economy", "a doctor", "democracy", "the brain", "rice",
    "a violin", "Napoleon", "the weather", "a tree", "science", "the Beatles", "an airplane", "dinosaurs", "the law",
)  # fmt: skip


def chat_turn(rng: random.Random, split: Split) -> Turn:
    questions, answer = rng.choice(_SMALL_TALK)
    return Turn("small talk", ask(rng, questions, split), answer)


def repeat_turn(rng: random.Random, split: Split) -> Turn:
    """Words to be said again as they are, most of which nobody ever said."""
    said = " ".join(_said(rng, split) for _ in range(rng.randint(1, 4)))
    mark = "0"  # nothing loosens a digit
    question = ask(rng, REPEAT, split, said=mark)
    return Turn("repeat", question.replace(mark, said), said)


def _said(rng: random.Random, split: Split) -> str:
    kind = rng.random()
    if kind < 0.15:
        return str(rng.randint(1, 999))
    if kind < 0.4:
        return _one(rng, _PLACES, split)
    return rng.choice((str, str, str.capitalize, str.upper))(words.made_up(rng))


def no_media_turn(rng: random.Random, split: Split) -> Turn:
    """A question about a picture, where there is none."""
    shape, color = rng.choice(SHAPES), rng.choice(tuple(COLORS))
    spot = rng.choice(ALL_PLACES)
    slots = {"name": rng.choice((shape, f"{color} {shape}")), "place": at(spot), "spot": spot, "color": color,
             "shape": shape, "shapes": plural(shape)}  # fmt: skip
    # Training asks most for what is often asked; its last ones are no questions that it never saw.
    often = describing.CAPTION[:29] if split == "train" else describing.CAPTION
    templates = (
        often, describing.CAPTION, describing.COLOR, describing.COLOR_IT, describing.SHAPE_IT,
        describing.PLACE, describing.WHAT, describing.BACKGROUND, describing.SHAPE,
        ("[Read it|Read that|Read this|Read the text].", "[Count the shapes|Count them].", "How many of them?",
         "[Which way|When|What happened|What changed|What happens]?", "Is there [a|any] {shape}?", "Any {shapes}?",
         "You see [a|any] {shape}?", "[Find|Box|Point to] the {shape}.", "[Where is it|How big is it|Is it big]?",
         "How many [shapes|things|objects] [are there|do you see]?", "How many {shapes} are there?",
         "What does [it|the sign] say?", "Is there a {shape}?", "What happens [in the video|in the clip|]?",
         "[Read|Transcribe] the text.", "Which way does it move?", "After how many seconds does it appear?",
         "Do you see any {shapes}?", "Tell me what it says."),
    )  # fmt: skip
    return Turn("no media", ask(rng, rng.choice(templates), split, **slots), NO_MEDIA)


def off_topic_turn(rng: random.Random, split: Split) -> Turn:
    """A question that nothing here answers; the things and places of each split are others."""
    slots = {"place": _one(rng, _PLACES, split), "thing": _one(rng, _THINGS, split), "number": rng.randint(2, 99)}
    if rng.random() < 0.3:  # the question of training, about what training never asked
        from_train = ask(rng, _OFF_TOPIC, "train", **slots)
        return Turn("off topic", from_train, CANT_TELL)
    return Turn("off topic", ask(rng, _OFF_TOPIC, split, **slots), CANT_TELL)


def _one(rng: random.Random, all_of: tuple[str, ...], split: Split) -> str:
    """The last fifth is held out."""
    bound = len(all_of) * 4 // 5
    return rng.choice(all_of[:bound] if split == "train" else all_of[bound:])


def _sample(turn: Callable[[random.Random, Split], Turn]) -> Callable[[random.Random, Split], Sample]:
    return lambda rng, split: conversation(rng, [turn(rng, split)], [])


SKILLS = (
    Skill("small talk", _sample(chat_turn), 95),
    Skill("repeat", _sample(repeat_turn), 95),
    Skill("no media", _sample(no_media_turn), 95),
    Skill("off topic", _sample(off_topic_turn), 95),
)
