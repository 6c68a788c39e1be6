"""What happens in a clip, to which shape, and when."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from qwen35mm.evaluation import scenes
from qwen35mm.evaluation.language import a, ask, capital
from qwen35mm.evaluation.scenes import EVENTS, MOTIONS, Split
from qwen35mm.evaluation.skills.base import Sample, Shown, Skill, Turn, conversation, video

_FRAMES_A_SECOND, _LEAST_FRAMES, _MOST_FRAMES = 2, 4, 32  # as the demo checkpoint's video processor samples them
_WAYS = {"left": "to the left", "right": "to the right", "up": "up", "down": "down"}
_VERBS = {"appear": ("appear", "appears"), "vanish": ("disappear", "disappears"), "change": ("change", "changes")}
CAPTION = (
    "[Can|Could] you tell me what happens[ here|in it|]?", "Describe what [takes place|goes on|is going on].",
    "Tell me what the [video|clip] shows.", "So what is going on?", "And what do you see in the clip?",
    "What happened in [it|the video]?",
)  # fmt: skip
MOTION = (
    "In [which|what] direction is [it|the {name}] moving?", "Tell me which way it [moves|goes].",
    "And which way does it go?", "Where did it move?", "And where is the {name} going?",
)  # fmt: skip
DOES_IT_MOVE = ("Do you see it move?", "And does it move?", "Is there any movement in it?")
CHANGE = (
    "Into [what|which] [color|colour] does it change?", "And what is the new [color|colour]?",
    "To [what|which] [color|colour] did it change?",
)  # fmt: skip
COLOR = ("Tell me [what|which] [color|colour] [it|the {name}] is.", "And [what|which] [color|colour] is it?")
SHAPE = ("What kind of shape do you see[ in the clip|]?", "And what shape is it?")
WHEN = (
    "Tell me [the second|the moment|the time] when [it|the {name}] {verb}s.",
    "At [what|which] moment does that happen?", "And when does it {verb}?", "And when did that happen?",
)  # fmt: skip
OTHERS = ("What else can you see?", "And is there anything else?", "Any other shape in it?")


def frame_times(duration_s: float, fps: float) -> list[float]:
    """Times in seconds of the frames that the video processor samples from a file with `fps` frames a second."""
    total = max(1, round(duration_s * fps))
    wanted = min(max(int(total / fps * _FRAMES_A_SECOND), _LEAST_FRAMES), _MOST_FRAMES)
    return [float(i) / fps for i in np.linspace(0, total - 1, min(wanted, total)).round()]


def seconds(shown: Shown) -> float:
    """The prompt's timestamp of the first pair of frames whose second frame is after the event."""
    times = shown.times_s + shown.times_s[-1:] * (len(shown.times_s) % 2)
    pairs = list(zip(times[::2], times[1::2], strict=True))
    first, second = next((pair for pair in pairs if pair[1] >= shown.clip.event_s), pairs[-1])
    return (first + second) / 2


def caption(shown: Shown) -> str:
    """'A red circle moves to the left.', 'A blue star appears.', 'A red circle stays still.'"""
    clip, item = shown.clip, shown.clip.start
    if clip.event == "change":
        return capital(f"{a(item.shape)} changes from {item.color} to {clip.end.color}.")
    if clip.event in MOTIONS:
        return capital(f"{a(item.name)} moves {_WAYS[clip.event]}.")
    return capital(f"{a(item.name)} {_VERBS[clip.event][1] if clip.event in _VERBS else 'stays still'}.")


def clip_turn(rng: random.Random, shown: Shown, skill: str) -> Turn:
    """A question of `skill` about a clip with one of the skill's events."""
    clip = shown.clip
    item, name = clip.start, clip.start.shape
    match skill:
        case "clip caption":
            return Turn(ask(rng, CAPTION), caption(shown))
        case "motion" if clip.event in MOTIONS:
            way = f"it moves {_WAYS[clip.event]}."
            if rng.random() < 0.25:
                return Turn(ask(rng, DOES_IT_MOVE, name=name), f"Yes, {way}")
            return Turn(ask(rng, MOTION, name=name), capital(way))
        case "motion":
            if rng.random() < 0.5:
                return Turn(ask(rng, DOES_IT_MOVE, name=name), "No, it does not move.")
            return Turn(ask(rng, MOTION, name=name), "It does not move.")
        case "change":
            return Turn(ask(rng, CHANGE, name=name), f"It changes from {item.color} to {clip.end.color}.")
        case "when":
            verb, says = _VERBS[clip.event]
            return Turn(ask(rng, WHEN, name=name, verb=verb), f"It {says} at {seconds(shown):.1f} seconds.")
        case "clip color":
            return Turn(ask(rng, COLOR, name=name), f"It is {item.color}.")
        case "clip shape":
            return Turn(ask(rng, SHAPE), f"It is a {name}.")
        case _:
            answer = f"There is also {a(clip.others[0].name)}." if clip.others else "There is nothing else."
            return Turn(ask(rng, OTHERS), answer)


def random_shown(rng: random.Random, split: Split, event: str) -> Shown:
    """A clip of this event, 1 to 40 seconds long, with the even sides that encoders need."""
    fps = rng.choice((8.0, 10.0, 12.0, 15.0, 24.0, 25.0, 30.0))
    long = rng.uniform(16, 40)
    duration = rng.choices((rng.uniform(1, 4), rng.uniform(3, 16), long), (5, 4, 1))[0]
    aspect = min(2.5, max(0.4, scenes.random_aspect(rng)))
    width, height = scenes.random_size(rng, aspect, 480)
    clip = scenes.random_clip(rng, (width // 2 * 2, height // 2 * 2), split, event, duration)
    return Shown(clip, frame_times(duration, fps), fps)


_EVENTS = {
    "clip caption": EVENTS,
    "motion": (*MOTIONS, *MOTIONS, "still"),
    "change": ("change",),
    "when": ("appear", "vanish", "change"),
    "clip color": (*MOTIONS, "appear", "vanish", "still"),
    "clip shape": EVENTS,
    "others": (*MOTIONS, "change", "appear", "still"),
}


def _sample(skill: str) -> Callable[[random.Random, Split], Sample]:
    def sample(rng: random.Random, split: Split) -> Sample:
        shown = random_shown(rng, split, rng.choice(_EVENTS[skill]))
        return conversation(rng, [clip_turn(rng, shown, skill)], [video(shown)])

    return sample


SKILLS = tuple(Skill(skill, _sample(skill)) for skill in _EVENTS)
