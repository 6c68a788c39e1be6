"""One tool call in the family's own format, and its result put into a sentence.

Most of training's tools are made up anew each time: twelve fixed ones were learned by heart, and a thirteenth was
never called by its own name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qwen35mm.evaluation import words
from qwen35mm.evaluation.language import ask
from qwen35mm.evaluation.scenes import Split
from qwen35mm.evaluation.skills.base import Sample, Skill
from qwen35mm.evaluation.skills.chat import chat_turn

_CITIES = ("Oslo", "Rome", "Paris", "Lima", "Cairo", "Tokyo", "Berlin", "Madrid", "Dublin", "Quito", "Delhi", "Seoul",
           "Vienna", "Boston", "Athens", "Geneva", "Lisbon", "Prague", "Warsaw", "Havana")  # fmt: skip
_PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Mia",
           "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor", "Wendy", "Yusuf", "Zoe", "Alice",
           "Bob")  # fmt: skip
_THINGS = ("milk", "bread", "apples", "paper", "coffee", "soap", "rice", "tea", "eggs", "honey", "pens", "salt")
_SONGS = ("Yesterday", "Imagine", "Thunder", "Hello", "Stay", "Halo", "Fire", "Rain", "Home", "Sunday")
_ROOMS = ("kitchen", "bedroom", "garage", "office", "garden", "bathroom", "hall", "cellar")


@dataclass(frozen=True)
class Tool:
    """A function: what it takes (name -> values, by kind), how people ask for it, what it returns and what is said.

    `says` uses the arguments and the result's `value`.
    """

    name: str
    description: str
    takes: dict[str, str]
    questions: tuple[str, ...]
    returns: str
    says: str

    def schema(self) -> dict[str, Any]:
        types = {key: {"type": "integer" if kind == "number" else "string"} for key, kind in self.takes.items()}
        parameters = {"type": "object", "properties": types, "required": list(types)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


_TOOLS = (
    Tool("get_weather", "The weather in a city", {"city": "city"}, (
        "{city} weather?", "[Is it|Will it be] [warm|hot|cold] in {city}?", "How is it in {city}, [warm|cold]?",
        "Weather [for|of] {city}.", "Check the weather in {city}.", "Temperature in {city}?",
        "How cold is it in {city}?",
        "What is the weather [like |]in {city}?", "How is the weather in {city}?",
        "[How warm|How hot] is it in {city}?", "What is the temperature in {city}?", "Tell me the weather in {city}.",
        "Weather in {city}?", "Is it [warm|hot|cold] in {city}?", "Tell me how [warm|hot] it is in {city}.",
        "Weather in {city}, please.", "Check how warm it is in {city}.",
    ), "temperature", "It is {value} degrees in {city}."),
    Tool("get_time", "The local time in a city", {"city": "city"}, (
        "{city} time?", "What is the time now in {city}?", "[Local time|Time] in {city}, please.",
        "What time is it now in {city}?", "Time now in {city}?", "The time in {city}?",
        "[Check|Show] the time in {city}.",
        "What time is it in {city}?", "How late is it in {city}?", "Tell me the time in {city}.",
        "What is the [local |]time in {city}?", "Which time is it in {city} now?",
        "Time in {city}?", "Tell me what time it is in {city}.",
        "The local time in {city}, please.", "Check what time it is in {city}.",
    ), "hour", "It is {value} o'clock in {city}."),
    Tool("set_timer", "Sets a timer", {"minutes": "number"}, (
        "Timer {minutes} minutes.", "{minutes} minutes timer.", "Timer for {minutes} minutes[, please|].",
        "[Set|Start] a timer: {minutes} minutes.", "{minutes} minute timer.", "Wake me up in {minutes} minutes.",
        "Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.",
        "[Start|I need] a timer of {minutes} minutes.", "Timer: {minutes} minutes.",
        "Remind me in {minutes} minutes.", "I need [to wake|a timer] in {minutes} minutes.",
        "I want a timer of {minutes} minutes.",
    ), "timer", "Timer {value} is set to {minutes} minutes."),
    Tool("call_person", "Calls a person", {"name": "person"}, (
        "[Phone|Ring|Ring up] {name}.", "Call {name} [now|for me|please].", "[Can|Could] you call {name}?",
        "I need to call {name}.", "Call up {name}.", "Get me {name} on the phone.", "{name}, call.",
        "Call {name}.", "[Please phone|Ring] {name}.", "I want to [talk to|call] {name}.",
        "Give {name} a [call|ring].", "Please call {name}.", "I want to give {name} a call.",
        "Please ring {name} now.", "I need to talk to {name} on the phone.",
    ), "line", "I am calling {name} on line {value}."),
    Tool("add_item", "Adds an item to a list", {"item": "thing", "count": "number"}, (
        "{count} {item}, add it.", "Add {count} {item}.", "{count} {item} on the list.",
        "{count} more {item} on my list.", "Put down {count} {item}.", "[Can|Could] you add {count} {item}?",
        "Add {count} {item} to [the list|my list].", "[Put|Write] {count} {item} on [the|my] list.",
        "We need {count} {item}, add it to the list.",
        "List: {count} {item}.", "[Put|Add] {count} {item} to the list, please.", "I need {count} {item} on my list.",
        "Put {count} more {item} on it.",
    ), "length", "Your list has {value} entries now."),
    Tool("play_song", "Plays a song", {"title": "song"}, (
        "[Can|Could] you play {title}?", "{title}, play it.", "Song: {title}.", "Play {title} [now|for me|please].",
        "[Put on|Start] {title}.", "I would like to hear {title}.", "Play that song {title}.",
        "Play {title}.", "I want to hear {title}.", "[Put on|Start] the song {title}.", "Let me hear {title}.",
        "Start [playing |]{title}.", "Play [me |]the song {title}.",
        "Please start the song {title}.", "I want the song {title}.",
    ), "minutes", "{title} is playing, it takes {value} minutes."),
    Tool("set_light", "Dims the light of a room", {"room": "room", "percent": "number"}, (
        "{room} light {percent} percent.", "Light in the {room} at {percent} percent.",
        "[Put|Set] the {room} light to {percent} percent.", "{room} to {percent} percent.",
        "{room}: {percent} percent light.", "Dim {room} to {percent}.",
        "Set the light in the {room} to {percent} percent.", "Dim the {room} to {percent} percent.",
        "{percent} percent light in the {room}.", "Make the light in the {room} {percent} percent.",
        "Light in the {room}: {percent} percent.", "Dim the light in the {room} to {percent} percent.",
        "Light in {room} to {percent} percent.",
    ), "percent", "The light in the {room} is at {value} percent."),
    Tool("multiply", "Multiplies two numbers", {"a": "number", "b": "number"}, (
        "{a} by {b}?", "{a} x {b}?", "{a} * {b}?", "How much is {a} by {b}?", "[Multiply|Compute] {a} and {b}.",
        "{a} times {b} is what?", "Multiply {a} x {b}.",
        "What is {a} times {b}?", "[Multiply|Compute] {a} by {b}.", "How much is {a} times {b}?", "{a} times {b}?",
        "Compute {a} times {b}.",
        "How much is {a} x {b}?",
    ), "product", "{a} times {b} is {value}."),
    Tool("get_price", "The price of a product", {"product": "thing"}, (
        "{product} price?", "How much for {product}?", "How much is {product}?", "Price for {product}?",
        "The price of {product}?", "What is the {product} price?", "Check the price of {product}.",
        "[What|How much] does {product} cost?", "What is the price of {product}?", "How expensive is {product}?",
        "Look up the price of {product}.",
        "Price of {product}?", "Look up how much {product} is.",
        "Check how much {product} is.", "Check what the price of {product} is.",
    ), "price", "The price of {product} is {value}."),
    Tool("find_flight", "Finds a flight", {"start": "city", "end": "city"}, (
        "Flight {start} to {end}.", "Flight from {start} to {end}?", "{start} to {end}, flight?",
        "Flights [from {start} to {end}|{start} to {end}].", "I want to fly from {start} to {end}.",
        "Any flight from {start} to {end}?", "Book me a flight from {start} to {end}.",
        "[Find|I need] a flight from {start} to {end}.", "How do I fly from {start} to {end}?",
        "Is there a flight from {start} to {end}?", "Fly me from {start} to {end}.",
        "Which flight goes from {start} to {end}?", "Is there a flight to {end} from {start}?",
        "Any flight to {end} from {start}?", "I need to fly to {end} from {start}.",
    ), "flight", "Take flight {value} from {start} to {end}."),
    Tool("count_people", "How many people are in a room", {"room": "room"}, (
        "People in the {room}?", "How many in the {room}?", "{room}, how many people?",
        "Number of people in the {room}?", "How many are in the {room}?", "Anybody in the {room}, and how many?",
        "How many people are in the {room}?", "Count the people in the {room}.", "Who is in the {room}, how many?",
        "How full is the {room}?", "How many people are there in the {room}?",
        "How many people in the {room} now?",
    ), "people", "There are {value} people in the {room}."),
    Tool("get_age", "How old a person is", {"name": "person"}, (
        "{name}, how old?", "Age of {name}?", "{name}'s age?", "The age of {name}[, please|].",
        "How old is {name} now?", "[Check|Look up] {name}'s age.",
        "How old is {name}?", "What is {name}'s age?", "Tell me the age of {name}.", "Which age does {name} have?",
        "Tell me how old {name} is.",
        "Look up how old {name} is.",
    ), "age", "{name} is {value} years old."),
    # Held out: training knows none of these.
    Tool("get_humidity", "The humidity in a city", {"city": "city"}, (
        "{city} humidity?", "Humidity of {city}?", "How humid is {city}?", "The humidity in {city}[, please|].",
        "Check the humidity in {city}.",
        "What is the humidity in {city}?", "How humid is it in {city}?", "Tell me the humidity in {city}.",
        "Humidity in {city}?",
        "Check how humid it is in {city}.",
    ), "humidity", "The humidity in {city} is {value}."),
    Tool("find_person", "Finds the room of a person", {"name": "person"}, (
        "Where is {name}?", "{name}, where?", "{name} is in which room?", "Room of {name}?", "Which room, {name}?",
        "Where can I find {name}?", "Find {name}.", "In which room is {name}?", "Which room is {name} in?",
        "Where is {name}, in which room?",
    ), "room", "{name} is in room {value}."),
)  # fmt: skip
_HELD_OUT = 2
# Of one noun each, which the question has, too; the name's second word needn't be it.
_VERBS = ("get", "find", "set", "send", "check", "read", "look_up", "compute", "show", "request")
_NOUNS = ("rent", "tax", "fee", "score", "level", "weight", "height", "rank", "speed", "noise", "pressure", "altitude",
          "rainfall", "tide", "traffic", "salary", "balance", "grade", "street", "seat", "desk", "house", "lane",
          "gate", "floor", "hotel", "train", "fan", "heater", "radio", "window", "oven", "alarm", "curtain", "sum",
          "distance", "letter", "parcel")  # fmt: skip
# What is measured, and the word that asks how much of it there is: it begins alike, and needn't be a word either.
_ASKED_AS = {"loudness": "loud", "brightness": "bright", "wetness": "wet", "dryness": "dry", "strength": "strong",
             "depth": "deep", "width": "wide", "safety": "safe", "density": "dense", "purity": "pure",
             "cloudiness": "cloudy", "windiness": "windy", "stability": "stable"}  # fmt: skip
_ENDINGS = ("ness", "ity", "age", "th")
_OBJECTS = ("person", "city", "item", "number")
_MADE_UP = (
    Tool("", "The {noun} in a city", {"city": "city"}, (
        "How {asked} is it in {city}?", "How {asked} is {city}?", "Is it {asked} in {city}?",
        "[Tell me|Say] how {asked} it is in {city}.", "{city}, how {asked}?", "[Look up|See] how {asked} {city} is.",
        "{city} {noun}?", "{noun} {city}.", "The {noun} for {city}?", "How much {noun} is in {city}?",
        "{noun} [in|for|of] {city}?", "[Check|Get|Show me] the {noun} [of|for] {city}.",
        "What is the {noun} in {city}?", "Tell me the {noun} in {city}.", "How [high |]is the {noun} in {city}?",
        "[Look up|Check] the {noun} in {city}.", "[I need the {noun} in|{noun} of|{noun} in|Current {noun} in] {city}.",
        "The {noun} of {city}, please.",
        "Give me the {noun} in {city}.",
    ), "{noun}", "The {noun} in {city} is {value}."),
    Tool("", "The {noun} of a person", {"name": "person"}, (
        "How {asked} is {name}?", "Is {name} {asked}?", "[Look up|Tell me] how {asked} {name} is.",
        "{name}'s {noun}?", "{noun} of {name}?", "{name} {noun}?", "What {noun} has {name}?",
        "[Get|Show] {name}'s {noun}.", "{noun} for {name}[, please|].",
        "What is the {noun} of {name}?", "Tell me {name}'s {noun}.", "Which {noun} does {name} have?",
        "[Look up the|Check the|The|] {noun} of {name}.", "I need {name}'s {noun}.",
        "Give me {name}'s {noun}.",
    ), "{noun}", "The {noun} of {name} is {value}."),
    Tool("", "Finds the {noun} of a person", {"name": "person"}, (
        "{name} is in which {noun}?", "{noun} of {name}?", "{name}'s {noun}?", "Which {noun}, {name}?",
        "[Look up|Get] {name}'s {noun}.", "{name}, which {noun}?",
        "In which {noun} is {name}?", "Find the {noun} of {name}.", "Find {name}'s {noun}.",
        "[Which|What] {noun} is {name} in?", "Where is {name}, in which {noun}?",
        "Tell me which {noun} {name} is in.",
    ), "{noun}", "{name} is in {noun} {value}."),
    Tool("", "Sets the {noun} of a room", {"room": "room", "level": "number"}, (
        "{room} {noun} to {level}.", "{noun} in the {room}: {level}.", "{noun} {level} in the {room}.",
        "Make the {noun} in the {room} {level}.", "[Set|Put] the {room} {noun} to {level}.",
        "Set the {noun} in the {room} to {level}.", "Put the {noun} in the {room} at {level}.",
        "I want the {noun} of the {room} at {level}.", "Change the {noun} in the {room} to {level}.",
        "Set {noun} to {level} in the {room}.",
    ), "{noun}", "The {noun} in the {room} is at {value}."),
    Tool("", "Sends something by {noun}", {"item": "thing", "name": "person"}, (
        "{item} to {name} by {noun}.", "[Get|Ship] {item} to {name} by {noun}.", "Send {item} by {noun} to {name}.",
        "{noun} {item} to {name}.", "[Can|Could] you send {item} to {name} by {noun}?",
        "Send {item} to {name} by {noun}.", "Send {name} {item} by {noun}.", "{name} needs {item}, send it by {noun}.",
        "By {noun}, send {item} to {name}.",
        "I want to send {item} to {name} by {noun}.",
    ), "{noun}", "{name} gets {item} by {noun} {value}."),
    Tool("", "The {noun} between two cities", {"start": "city", "end": "city"}, (
        "{noun} {start} to {end}?", "{noun} from {start} to {end}?", "{start} to {end}, [what|which] {noun}?",
        "[Check|Look up|Get] the {noun} from {start} to {end}.", "The {noun} from {start} to {end}[, please|].",
        "What is the {noun} from {start} to {end}?", "Tell me the {noun} from {start} to {end}.",
        "How [high |]is the {noun} from {start} to {end}?", "From {start} to {end}, what is the {noun}?",
        "Give me the {noun} from {start} to {end}.",
    ), "{noun}", "The {noun} from {start} to {end} is {value}."),
    Tool("", "The {noun} of two numbers", {"a": "number", "b": "number"}, (
        "{noun} of {a} and {b}?", "{noun} {a} {b}.", "[Compute|Get] the {noun} of {a} and {b}.",
        "{a} and {b}, what is the {noun}?", "{noun} for {a} and {b}?",
        "What is the {noun} of {a} and {b}?", "Give me the {noun} of {a} and {b}.", "The {noun} of {a} and {b}?",
        "Tell me the {noun} of {a} and {b}.",
        "I need the {noun} of {a} and {b}.",
    ), "{noun}", "The {noun} of {a} and {b} is {value}."),
)  # fmt: skip


def _made_up(rng: random.Random, verb: str | None = None) -> Tool:
    """A tool that there never was: of a noun that may be no word, and of a name that has it mostly."""
    tool, (noun, asked) = rng.choice(_MADE_UP), _noun(rng)
    held_out = [each.name for each in _TOOLS[-_HELD_OUT:]]
    name = held_out[0]
    while name in held_out:
        second = noun if rng.random() < 0.6 else rng.choice((_noun(rng)[0], *_OBJECTS))
        name = f"{verb or rng.choice(_VERBS)}_{second}"
    questions = [each for each in tool.questions if asked or "{asked}" not in each]
    parts = (tool.description, tool.returns, tool.says, *questions)
    description, returns, says, *questions = (
        part.replace("{noun}", noun).replace("{asked}", asked or "") for part in parts
    )
    return Tool(name, description, tool.takes, tuple(questions), returns, says)


def _noun(rng: random.Random) -> tuple[str, str | None]:
    """A noun, and the word that asks how much of it there is, if there is one."""
    chosen = rng.random()
    if chosen < 0.4:
        return rng.choice(_NOUNS), None
    if chosen < 0.5:
        return rng.choice(tuple(_ASKED_AS.items()))
    made_up = words.made_up(rng)
    return (made_up, None) if chosen < 0.8 else (made_up + rng.choice(_ENDINGS), made_up)


def random_call(rng: random.Random, split: Split) -> tuple[list[dict[str, Any]], Tool, dict[str, Any], str]:
    """(schemas, the tool that is wanted, its arguments, the question); in "combos" always a held-out tool."""
    known, others = _TOOLS[:-_HELD_OUT], _TOOLS[-_HELD_OUT:]
    tool = rng.choice(others if split == "combos" else known)
    beside = rng.sample([each for each in known if each is not tool], rng.randint(0, 2))
    if split == "train":
        tool = _made_up(rng) if rng.random() < 0.6 else tool
        # Of the same verb mostly: else a name is known by it, and what comes after it need not be read.
        verb = tool.name.split("_")[0] if rng.random() < 0.6 else None
        beside = [_made_up(rng, verb) if rng.random() < 0.5 else each for each in beside]
        beside = [each for i, each in enumerate(beside) if each.name not in [t.name for t in (tool, *beside[:i])]]
    schemas = [each.schema() for each in rng.sample([tool, *beside], len(beside) + 1)]
    values = {"city": _CITIES, "person": _PEOPLE, "thing": _THINGS, "song": _SONGS, "room": _ROOMS}
    arguments: dict[str, Any] = {}
    for key, kind in tool.takes.items():
        while key not in arguments or list(arguments.values()).count(arguments[key]) > 1:
            if kind == "number":
                arguments[key] = rng.randint(2, 99)
            elif split == "train" and kind in ("city", "person", "song") and rng.random() < 0.25:
                arguments[key] = words.made_up(rng).capitalize()
            else:
                arguments[key] = rng.choice(values[kind])
    return schemas, tool, arguments, ask(rng, tool.questions, split, **arguments)


def call_sample(rng: random.Random, split: Split) -> Sample:
    schemas, tool, arguments, question = random_call(rng, split)
    messages = [{"role": "user", "content": question}, _called(tool, arguments)]
    return Sample("tool call", messages, ["tool call"], "call", tools=schemas)


def result_sample(rng: random.Random, split: Split) -> Sample:
    schemas, tool, arguments, question = random_call(rng, split)
    value = rng.randint(1, 99)
    messages = [
        {"role": "user", "content": question},
        _called(tool, arguments),
        {"role": "tool", "content": json.dumps({tool.returns: value})},
        {"role": "assistant", "content": tool.says.format(value=value, **arguments)},
    ]
    return Sample("tool result", messages, ["tool call", "tool result"], tools=schemas)


def restraint_sample(rng: random.Random, split: Split) -> Sample:
    """Tools are there, and nothing that needs one is asked."""
    schemas, *_ = random_call(rng, split)
    turn = chat_turn(rng, split)
    messages = [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    return Sample("tool restraint", messages, ["tool restraint"], tools=schemas)


def _called(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_KINDS: dict[str, Callable[[random.Random, Split], Sample]] = {
    "tool call": call_sample,
    "tool result": result_sample,
    "tool restraint": restraint_sample,
}
SKILLS = tuple(Skill(name, sample, 95) for name, sample in _KINDS.items())
