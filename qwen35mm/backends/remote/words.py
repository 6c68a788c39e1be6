"""Messages for a person about a server's failures: one function each, given the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from qwen35mm_preprocess.say import Saying, say


class Where(NamedTuple):
    """The server that a message is about.

    Attributes:
        host: the server's name.
        status: the response's, with its phrase; empty without a response.
        said: its own words, made safe.
        quoted: a colon and these words in quotes, if any, and a full stop.
    """

    host: str
    status: str = ""
    said: str = ""
    quoted: str = "."


Words = Callable[[Where], Saying]


def unreachable(at: Where) -> Saying:
    return say(
        "The server at {host} can't be reached. Check that it runs, its address, its certificate and the network.",
        host=at.host,
    )


def slow_to_connect(at: Where) -> Saying:
    return say(
        "The server at {host} didn't take the connection in time. Check that it runs, and its address.", host=at.host
    )


def broken_off(at: Where) -> Saying:
    return say(
        "The server at {host} broke off the connection. Look at its log; it may have run out of memory or been "
        "restarted.",
        host=at.host,
    )


def too_long(most: int) -> Words:
    return lambda at: say(
        "The answer of the server at {host} is longer than {most} MiB. Ask for less at a time.", host=at.host, most=most
    )


def overdue(seconds: str) -> Words:
    return lambda at: say(
        "The server at {host} gave no whole answer within {seconds} s. Allow more time, or send it fewer requests at a "
        "time.",
        host=at.host,
        seconds=seconds,
    )


def silent(seconds: str) -> Words:
    return lambda at: say(
        "The server at {host} sent nothing for {seconds} s. Look at its log, or send it fewer requests at a time.",
        host=at.host,
        seconds=seconds,
    )


def silent_amid(seconds: str) -> Words:
    return lambda at: say(
        "The server at {host} fell silent for {seconds} s amid its answer. Look at its log, or send it fewer requests "
        "at a time.",
        host=at.host,
        seconds=seconds,
    )


def damaged(at: Where) -> Saying:
    return say("The server at {host} sent a damaged answer: {said}. Look at its log.", host=at.host, said=at.said)


def foreign(at: Where) -> Saying:
    return say(
        "The server at {host} doesn't speak OpenAI's API at this address: it answered {status} with {said}. Check the "
        "address; it usually ends in /v1.",
        host=at.host,
        status=at.status,
        said=at.said,
    )


def withheld(at: Where) -> Saying:
    return say("The server at {host} withheld its answer: its content filter stepped in.", host=at.host)


def no_access(at: Where) -> Saying:
    return say(
        "The server at {host} refused access with {status}{quoted} Check the API key.",
        host=at.host,
        status=at.status,
        quoted=at.quoted,
    )


def not_there(at: Where) -> Saying:
    return say(
        "The server at {host} answered {status}{quoted} Check the address, which usually ends in /v1, and the model's "
        "name.",
        host=at.host,
        status=at.status,
        quoted=at.quoted,
    )


def gave_up(at: Where) -> Saying:
    return say(
        "The server at {host} gave up waiting{quoted} Send it fewer requests at a time.",
        host=at.host,
        quoted=at.quoted,
    )


def too_large(at: Where) -> Saying:
    return say(
        "The server at {host} refused the request as too large{quoted} Send smaller or fewer media.",
        host=at.host,
        quoted=at.quoted,
    )


def busy(at: Where) -> Saying:
    return say(
        "The server at {host} has too many requests already{quoted} Send it fewer at a time.",
        host=at.host,
        quoted=at.quoted,
    )


def elsewhere(at: Where) -> Saying:
    return say(
        "The server at {host} points to another address ({status}). Give that one instead.",
        host=at.host,
        status=at.status,
    )


def failed(at: Where) -> Saying:
    return say(
        "The server at {host} failed with {status}{quoted} Look at its log.",
        host=at.host,
        status=at.status,
        quoted=at.quoted,
    )


def refused(at: Where) -> Saying:
    return say(
        "The server at {host} refused the request with {status}{quoted}",
        host=at.host,
        status=at.status,
        quoted=at.quoted,
    )


def unknown(names: str) -> Words:
    return lambda at: say(
        "The server at {host} doesn't know {names}{quoted} Leave that setting at its default, or use a server that "
        "knows it.",
        host=at.host,
        names=names,
        quoted=at.quoted,
    )


def no_pictures(at: Where) -> Saying:
    return say(
        "The model at {host} can't see pictures{quoted} Leave them out, or use a model and a server that can.",
        host=at.host,
        quoted=at.quoted,
    )


def no_tools(at: Where) -> Saying:
    return say(
        "The server at {host} takes no tools{quoted} Leave them out, or start it with tools enabled.",
        host=at.host,
        quoted=at.quoted,
    )


def no_schemas(at: Where) -> Saying:
    return say(
        "The server at {host} can't hold an answer to a JSON schema{quoted} Use a server that can.",
        host=at.host,
        quoted=at.quoted,
    )


def kept(error: Saying) -> Saying:
    return say("{error} What it had answered until then is kept.", error=error)


def tried(error: Saying, num_attempts: int) -> Saying:
    if num_attempts == 1:
        return say("{error} It was tried once.", error=error)
    return say("{error} It was tried {n} {n|time|times}.", error=error, n=num_attempts)
