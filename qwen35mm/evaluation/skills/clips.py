"""What happens in clips, to what, and when: the time is that of the first frames that show it, as the prompt has it."""

from __future__ import annotations

import random

from qwen35mm.evaluation import scenes
from qwen35mm.evaluation.language import a, ask, capital
from qwen35mm.evaluation.scenes import EVENTS, MOTIONS, Split
from qwen35mm.evaluation.skills.base import Sample, Shown, Skill, Turn, conversation, video
from training.media import random_timing

MOTION_PHRASES = {"left": "to the left", "right": "to the right", "up": "up", "down": "down"}
CAPTION = (
    "What happened?", "[So what|And what] happens?", "What goes on[ here|]?", "[Summary|Description]?",
    "[Describe|Summarize|Explain] it.", "What did you see?", "What is this [video|clip] about?", "What is it about?",
    "What happens in it?", "In short, what happens?", "What is [going on|happening]?",
    "What happens?",
    "What happens [in the video|in the clip|in this video|here]?",
    "What is [happening|going on] [in this clip|in the video|here]?",
    "[Describe|Summarize|Summarise|Caption] [the video|this clip|the clip|this video].",
    "Describe what happens.",
    "What do you see in the [video|clip]?",
    "What is in this [video|clip]?",
    "What does the [video|clip] show?",
    "Tell me what [happens|you see].",
    "[What is this|What do you see]?",
    "What [changes|goes on] in [it|the video]?",
    "[Can|Could] you [summarize|describe] what [takes place|is going on]?",
    "Tell me [about|what is in] [this|the] [video|clip].",
    "What [takes place|can be seen] [here|in the clip]?",
    "Give me a [description|summary] of the [video|clip].",
    "[Can|Could] you tell me what happens[ here|in it|]?",
    "Describe what [takes place|goes on|is going on].",
    "Tell me what the [video|clip] shows.",
    "So what is going on?", "And what do you see in the clip?", "What happened in [it|the video]?",
)  # fmt: skip
MOTION = (
    "Which way?", "What direction?", "Direction?", "Where to?", "Where did [it|the {name}] go?",
    "It goes where?",
    "And which way?", "The {name}, it goes where?", "Direction of the {name}?", "Where does it go to?",
    "Which way did it go?",
    "[Which way|Where] does it [move|go]?",
    "In [which|what] direction does it move?",
    "[Which way|Where] does the {name} [move|go]?",
    "How does the {name} move?",
    "[What|Which] direction is it moving in?",
    "In which direction does the {name} [move|go]?",
    "Where is the {name} [going|heading|moving] to?",
    "[Where|Which way] is it [going|heading|moving]?",
    "Tell me [where|which way] the {name} moves.",
    "How does it move?",
    "In [which|what] direction is [it|the {name}] moving?",
    "Tell me which way it [moves|goes].",
    "And which way does it go?", "Where did it move?", "And where is the {name} going?",
)  # fmt: skip
DOES_IT_MOVE = (
    "Any movement?", "Moving?", "Did it move?", "Anything moving?", "Does [it|the {name}] move or not?",
    "Is there any [movement|motion]?", "Did the {name} move?",
    "Does it move?",
    "Does the {name} move?",
    "Is the {name} moving?",
    "Is it moving?",
    "Does the {name} change its position?",
    "Do you see the {name} move?",
    "Does anything move?",
    "Can you see [if|whether] the {name} moves?",
    "Do you see it move?",
    "And does it move?", "Is there any movement in it?",
)  # fmt: skip
CHANGE = (
    "New [color|colour]?", "What is the new [color|colour]?", "[color|colour] [at the end|after|afterwards]?",
    "Changes to [what|which] [color|colour]?", "How did the [color|colour] change?",
    "What does it [change|turn] into?", "[What|Which] [color|colour] did it become?",
    "[What|Which] [color|colour] does it [become|turn into|get]?",
    "How does [its|the] [color|colour] change?",
    "[What|Which] [color|colour] does the {name} [become|turn into|change to]?",
    "To [what|which] [color|colour] does it change?",
    "Into which [color|colour] does the {name} turn?",
    "[What|Which] [color|colour] is it [afterwards|then]?",
    "Tell me [what|which] [color|colour] the {name} [becomes|gets].",
    "[What|Which] [color|colour] does it [have|turn] at the end?",
    "Into [what|which] [color|colour] does it change?",
    "And what is the new [color|colour]?", "To [what|which] [color|colour] did it change?",
)  # fmt: skip
COLOR = (
    "[color|colour]?", "[What|Which] [color|colour]?", "Its [color|colour]?", "[color|colour] of [it|the {name}]?",
    "And the [color|colour]?", "[It|The {name}] is [what|which] [color|colour]?",
    "[What|Which] [color|colour] is [it|the {name}]?",
    "What is the [color|colour] of [it|the {name}]?",
    "[What|Which] [color|colour] does [it|the {name}] have?",
    "What would you call the [color|colour] of the {name}?",
    "Tell me the [color|colour] of the {name}.",
    "Tell me [what|which] [color|colour] [it|the {name}] has.",
    "Tell me [what|which] [color|colour] [it|the {name}] is.",
    "And [what|which] [color|colour] is it?",
)  # fmt: skip
SHAPE = (
    "Shape?", "[What|Which] shape?", "Which shape is it?", "And the shape?", "It is [what|which] shape?",
    "The shape[, please|]?",
    "[What|Which] shape [moves|is it|changes|is in the video]?",
    "[What|Which] shape do you see [in the video|]?",
    "What kind of shape is it?",
    "[What|Which] shape is this about?",
    "Tell me which shape [it is|is in it].",
    "[What|Which] shape is [in it|there|in the clip]?",
    "What kind of shape do you see[ in the clip|]?",
    "And what shape is it?",
)  # fmt: skip
WHEN = (
    "When?", "At what time?", "[What|Which] second?", "When was that?", "And when?",
    "When did [it|the {name}] {verb}?", "At what second?", "When did that happen?",
    "When does [it|the {name}] {verb}?",
    "At [what|which] [time|second|moment] does [it|the {name}] {verb}?",
    "When [exactly |]does that happen?",
    "At which [time|second] does that happen?",
    "At what point [in the video |]does the {name} {verb}?",
    "After how many seconds does [it|the {name}] {verb}?",
    "Tell me when [it|the {name}] {verb}s.",
    "After how many seconds does that happen?",
    "Tell me [the second|the moment|the time] when [it|the {name}] {verb}s.",
    "At [what|which] moment does that happen?",
    "And when does it {verb}?", "And when did that happen?",
)  # fmt: skip
OTHERS = (
    "What else?", "Anything else?", "And what else?", "Other shapes?", "Anything else in [it|there]?",
    "Any other [shapes|things]?",
    "What else [is there|do you see|is in the video]?",
    "Is there anything else [in the video|]?",
    "[Which|What] other shape is there?",
    "What else can be seen?",
    "Do you see anything else?",
    "Which other shape do you see?",
    "What else can you see?",
    "And is there anything else?", "Any other shape in it?",
)  # fmt: skip
_VERBS = {"appear": ("appear", "appears"), "vanish": ("disappear", "disappears"), "change": ("change", "changes")}


def seconds(shown: Shown) -> float:
    """The time that the prompt gives to the first two frames of which the second one is after the event."""
    times = shown.times_s + shown.times_s[-1:] * (len(shown.times_s) % 2)
    pairs = list(zip(times[::2], times[1::2], strict=True))
    first, second = next((pair for pair in pairs if pair[1] >= shown.clip.event_s), pairs[-1])
    return (first + second) / 2


def caption(shown: Shown) -> str:
    """'A red circle moves to the left.', 'A blue star appears at 2.5 seconds.', 'A red circle stays still.'"""
    clip, item = shown.clip, shown.clip.start
    if clip.event == "change":
        return capital(f"{a(item.shape)} changes from {item.color} to {clip.end.color}.")
    if clip.event in MOTIONS:
        return capital(f"{a(item.name)} moves {MOTION_PHRASES[clip.event]}.")
    return capital(f"{a(item.name)} {_VERBS[clip.event][1] if clip.event in _VERBS else 'stays still'}.")


def clip_turn(rng: random.Random, shown: Shown, split: Split, skill: str) -> Turn | None:
    """A question of `skill` about the clip, or None where it has none."""
    clip = shown.clip
    item, name = clip.start, clip.start.shape
    if skill == "clip caption":
        return Turn(skill, ask(rng, CAPTION, split), caption(shown), item)
    if skill == "motion":
        if clip.event in MOTIONS:
            answer = f"It moves {MOTION_PHRASES[clip.event]}."
            if rng.random() < 0.25:
                return Turn(
                    skill,
                    ask(rng, DOES_IT_MOVE, split, name=name),
                    f"Yes, it moves {MOTION_PHRASES[clip.event]}.",
                    item,
                )
            return Turn(skill, ask(rng, MOTION, split, name=name), answer, item)
        if clip.event == "still" or rng.random() < 0.3:
            if rng.random() < 0.5:
                return Turn(skill, ask(rng, DOES_IT_MOVE, split, name=name), "No, it does not move.", item)
            return Turn(skill, ask(rng, MOTION, split, name=name), "It does not move.", item)
        return None
    if skill == "change" and clip.event == "change":
        answer = f"It changes from {item.color} to {clip.end.color}."
        return Turn(skill, ask(rng, CHANGE, split, name=name), answer, item)
    if skill == "when" and clip.event in _VERBS:
        verb, says = _VERBS[clip.event]
        question = ask(rng, WHEN, split, name=name, verb=verb)
        return Turn(skill, question, f"It {says} at {seconds(shown):.1f} seconds.", item)
    if skill == "clip color" and clip.event != "change":
        return Turn(skill, ask(rng, COLOR, split, name=name), f"It is {item.color}.", item)
    if skill == "clip shape":
        return Turn(skill, ask(rng, SHAPE, split), f"It is a {name}.", item)
    if skill == "others":
        answer = f"There is also {a(clip.others[0].name)}." if clip.others else "There is nothing else."
        return Turn(skill, ask(rng, OTHERS, split), answer)
    return None


def random_shown(rng: random.Random, split: Split, event: str | None = None, most_frames: int = 32) -> Shown:
    fps = rng.choice((8.0, 10.0, 12.0, 15.0, 24.0, 25.0, 30.0))
    duration, times = random_timing(rng, most_frames, fps)
    aspect = min(2.5, max(0.4, scenes.random_aspect(rng)))
    width, height = scenes.random_size(rng, aspect, 480)
    size = (width // 2 * 2, height // 2 * 2)  # as encoders want it
    return Shown(scenes.random_clip(rng, size, split, event, duration), times, fps)


EVENTS_OF = {
    "clip caption": EVENTS,
    "motion": (*MOTIONS, *MOTIONS, "still"),
    "change": ("change",),
    "when": ("appear", "vanish", "change"),
    "clip color": (*MOTIONS, "appear", "vanish", "still"),
    "clip shape": EVENTS,
    "others": (*MOTIONS, "change", "appear", "still"),
}


def _sample(skill: str):
    def sample(rng: random.Random, split: Split) -> Sample:
        while True:
            shown = random_shown(rng, split, rng.choice(EVENTS_OF[skill]))
            turn = clip_turn(rng, shown, split, skill)
            if turn is not None:
                return conversation(rng, [turn], [video(shown)])

    return sample


SKILLS = tuple(Skill(skill, _sample(skill)) for skill in EVENTS_OF)
