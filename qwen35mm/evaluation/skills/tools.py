"""A tool call in Qwen's own format, and a sentence from a tool's result."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

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
    """A function that the model may call.

    Attributes:
        takes: the kind of value of each argument.
        questions: templates of requests; slots are the arguments.
        returns: the key of the result.
        says: template of the answer; slots are the arguments and the result's `value`.
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
    Tool("get_weather", "The weather in a city", {"city": "city"},
         ("Tell me how [warm|hot] it is in {city}.", "Weather in {city}, please.", "Check how warm it is in {city}."),
         "temperature", "It is {value} degrees in {city}."),
    Tool("get_time", "The local time in a city", {"city": "city"},
         ("Tell me what time it is in {city}.", "The local time in {city}, please.",
         "Check what time it is in {city}."), "hour", "It is {value} o'clock in {city}."),
    Tool("set_timer", "Sets a timer", {"minutes": "number"},
         ("I need [to wake|a timer] in {minutes} minutes.", "I want a timer of {minutes} minutes."), "timer",
         "Timer {value} is set to {minutes} minutes."),
    Tool("call_person", "Calls a person", {"name": "person"},
         ("I want to give {name} a call.", "Please ring {name} now.", "I need to talk to {name} on the phone."), "line",
         "I am calling {name} on line {value}."),
    Tool("add_item", "Adds an item to a list", {"item": "thing", "count": "number"},
         ("I need {count} {item} on my list.", "Put {count} more {item} on it."), "length",
         "Your list has {value} entries now."),
    Tool("play_song", "Plays a song", {"title": "song"},
         ("Play [me |]the song {title}.", "Please start the song {title}.", "I want the song {title}."), "minutes",
         "{title} is playing, it takes {value} minutes."),
    Tool("set_light", "Dims the light of a room", {"room": "room", "percent": "number"},
         ("Dim the light in the {room} to {percent} percent.", "Light in {room} to {percent} percent."), "percent",
         "The light in the {room} is at {value} percent."),
    Tool("multiply", "Multiplies two numbers", {"a": "number", "b": "number"},
         ("Compute {a} times {b}.", "How much is {a} x {b}?"), "product", "{a} times {b} is {value}."),
    Tool("get_price", "The price of a product", {"product": "thing"},
         ("Look up how much {product} is.", "Check how much {product} is.", "Check what the price of {product} is."),
         "price", "The price of {product} is {value}."),
    Tool("find_flight", "Finds a flight", {"start": "city", "end": "city"},
         ("Is there a flight to {end} from {start}?", "Any flight to {end} from {start}?",
         "I need to fly to {end} from {start}."), "flight", "Take flight {value} from {start} to {end}."),
    Tool("count_people", "How many people are in a room", {"room": "room"},
         ("How many people are there in the {room}?", "How many people in the {room} now?"), "people",
         "There are {value} people in the {room}."),
    Tool("get_age", "How old a person is", {"name": "person"},
         ("Tell me how old {name} is.", "Look up how old {name} is."), "age", "{name} is {value} years old."),
)  # fmt: skip
# Training used neither of these.
_NEW_TOOLS = (
    Tool("get_humidity", "The humidity in a city", {"city": "city"},
         ("Humidity in {city}?", "Check how humid it is in {city}."), "humidity", "The humidity in {city} is {value}."),
    Tool("find_person", "Finds the room of a person", {"name": "person"},
         ("Which room is {name} in?", "Where is {name}, in which room?"), "room", "{name} is in room {value}."),
)  # fmt: skip
_VALUES = {"city": _CITIES, "person": _PEOPLE, "thing": _THINGS, "song": _SONGS, "room": _ROOMS}


def random_call(rng: random.Random, split: Split) -> tuple[list[dict[str, Any]], Tool, dict[str, Any], str]:
    """(schemas, the tool to call, its arguments, the question). "combos" uses a new tool."""
    tool = rng.choice(_NEW_TOOLS if split == "combos" else _TOOLS)
    beside = rng.sample([each for each in _TOOLS if each is not tool], rng.randint(0, 2))
    schemas = [each.schema() for each in rng.sample([tool, *beside], len(beside) + 1)]
    arguments: dict[str, Any] = {}
    for key, kind in tool.takes.items():
        while key not in arguments or list(arguments.values()).count(arguments[key]) > 1:
            arguments[key] = rng.randint(2, 99) if kind == "number" else rng.choice(_VALUES[kind])
    return schemas, tool, arguments, ask(rng, tool.questions, **arguments)


def call_sample(rng: random.Random, split: Split) -> Sample:
    schemas, tool, arguments, question = random_call(rng, split)
    return Sample([{"role": "user", "content": question}, _called(tool, arguments)], "call", tools=schemas)


def result_sample(rng: random.Random, split: Split) -> Sample:
    schemas, tool, arguments, question = random_call(rng, split)
    value = rng.randint(1, 99)
    messages = [
        {"role": "user", "content": question},
        _called(tool, arguments),
        {"role": "tool", "content": json.dumps({tool.returns: value})},
        {"role": "assistant", "content": tool.says.format(value=value, **arguments)},
    ]
    return Sample(messages, tools=schemas)


def restraint_sample(rng: random.Random, split: Split) -> Sample:
    """Small talk: the right answer calls none of the offered tools."""
    schemas, *_ = random_call(rng, split)
    turn = chat_turn(rng)
    messages = [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    return Sample(messages, tools=schemas)


def _called(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


SKILLS = (
    Skill("tool call", call_sample, 95),
    Skill("tool result", result_sample, 95),
    Skill("tool restraint", restraint_sample, 95),
)
