"""Replies in progress: what is shown is stored, who watches decides how long they go on, Stop ends them."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest

from qwen35mm.chat.replies.reply import UPDATE_INTERVAL_S, Reply
from qwen35mm.errors import StorageError
from qwen35mm_preprocess.say import english
from tests.chat.chat_kit import GRACE_S, ME, OTHER, PICTURE, ChatKit, Timers
from tests.chat.helpers import full_disk

# It is answered in words that fill a page of the database at once.
FAST = "slow " + "long" * 2000


class Gate:
    """Holds the store's first `update` until the block ends, or `open`; the first `fails` go as on a full disk."""

    def __init__(self, kit: ChatKit, monkeypatch: pytest.MonkeyPatch, *, is_open: bool = False, fails: int = 0) -> None:
        self._kit, self._open, self.entered, self.fails = kit, threading.Event(), threading.Event(), fails
        if is_open:
            self._open.set()
        real = kit.store.update

        def update(*args: Any, **fields: Any) -> None:
            if not self.entered.is_set():
                self.entered.set()
                self._open.wait()
            if self.fails:
                self.fails -= 1
                raise StorageError("The disk is full.")
            real(*args, **fields)

        monkeypatch.setattr(kit.store, "update", update)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def open(self) -> None:
        self._open.set()

    async def reply_at_it(self, reply_id: str) -> Reply:
        """The reply, once the store is held."""
        await asyncio.to_thread(self.entered.wait)
        reply = self._kit.replies.find(ME.owner, reply_id)
        assert reply is not None
        return reply


async def test_what_is_shown_is_stored_first(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, reply_id = await kit.send("echo one two")
    with Gate(kit, monkeypatch) as gate:
        watching = asyncio.create_task(kit.watch(reply_id))
        reply = await gate.reply_at_it(reply_id)
        assert reply.node.text
        assert reply.shown.text == ""
    assert "one two" in (await watching)["blocks"][0]
    assert kit.node(conversation, reply_id).text == "one two "


async def test_10_to_20_drawings_a_second_whatever_the_models_speed(
    kit: ChatKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 10 <= 1 / UPDATE_INTERVAL_S <= 20
    monkeypatch.setattr("qwen35mm.chat.replies.reply.UPDATE_INTERVAL_S", GRACE_S)
    _, reply_id = await kit.send("slow")
    await kit.watch(reply_id, until=lambda view: view["blocks"])
    reply = kit.replies.find(ME.owner, reply_id)
    assert reply is not None
    shown = reply.shown.text
    while len(reply.node.text) < len(shown) + 200:
        await asyncio.sleep(0)
    assert reply.shown.text == shown
    await reply.stop()
    assert reply.shown.text == reply.node.text


async def test_a_full_disk_does_not_end_a_reply_and_is_told(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, reply_id = await kit.send("echo all of it")
    Gate(kit, monkeypatch, is_open=True, fails=1000)
    view = await kit.watch(reply_id, until=lambda view: view["status"] != "running")
    assert (view["status"], view["unsaved"]) == ("finished", "The disk is full.")
    assert "all of it" in view["blocks"][0]
    assert kit.node(conversation, reply_id).text == ""


async def test_what_could_not_be_stored_is_stored_later(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, reply_id = await kit.send("phases think", files=[kit.attach(PICTURE)])
    kit.backend.completes_plans = True
    gate = Gate(kit, monkeypatch, is_open=True, fails=1)
    told = []

    def look(view: dict[str, Any]) -> bool:
        told.append(view["unsaved"])
        if told[-1] or (view["work"] and view["work"]["share"]):
            kit.backend.next_phase()
        return False

    view = await kit.watch(reply_id, until=look)
    assert gate.fails == 0
    assert "The disk is full." in told
    assert (view["status"], view["unsaved"]) == ("finished", None)
    node = kit.node(conversation, reply_id)
    assert (node.status, bool(node.text), bool(node.stats)) == ("finished", True, True)
    question = kit.path(conversation)[0]
    assert question.attachments[0].plan is not None
    assert question.attachments[0].plan.digest == "ab" * 32


@pytest.mark.parametrize(
    "later",
    ["a message", *(pytest.param(each, marks=pytest.mark.slow) for each in ("a while", "the end of the server"))],
)
async def test_what_a_full_disk_cut_off_goes_on_being_shown_and_is_stored_later(
    kit: ChatKit, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    timers = Timers(monkeypatch)
    kit.backend.context_length = 10**6
    conversation, reply_id = await kit.send(FAST)
    with full_disk(kit.store):
        watching = asyncio.create_task(kit.watch(reply_id))
        await kit.watch(reply_id, until=lambda view: "disk is full" in english(view["unsaved"] or ""))
        await kit.api.stop(ME, reply_id)
        reply = kit.replies.find(ME.owner, reply_id)
        assert reply is not None
        assert len(kit.node(conversation, reply_id).text) < len(reply.node.text)
        timers.fire()  # in vain
        with pytest.raises(StorageError, match="disk is full"):
            await kit.send("echo on", conversation, reply_id)
        shown = (await kit.api.open(ME, conversation))["messages"][-1]
        assert (shown["status"], shown["text"]) == ("stopped", reply.node.text)
        assert "disk is full" in english(shown["unsaved"])
        assert not watching.done()
    if later == "a message":
        await kit.ask("echo on", conversation, reply_id)
        assert kit.prompt[1] == ("assistant", reply.node.text.strip())
    elif later == "a while":
        while not watching.done():
            timers.fire()
            await asyncio.sleep(0.001)
        timers.fire()
        assert kit.replies.find(ME.owner, reply_id) is None
    else:
        kit.replies.close()
    assert (kit.node(conversation, reply_id).status, kit.node(conversation, reply_id).text) == (
        "stopped",
        reply.node.text,
    )
    assert (await watching)["unsaved"] is None
    assert "unsaved" not in (await kit.api.open(ME, conversation))["messages"][1]


async def test_what_could_not_be_stored_and_was_deleted_is_forgotten(
    kit: ChatKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = Timers(monkeypatch)
    conversation, reply_id = await kit.send(FAST)
    with full_disk(kit.store):
        await kit.watch(reply_id, until=lambda view: view["unsaved"])
        await kit.api.stop(ME, reply_id)
    await kit.api.delete_message(ME, conversation, reply_id)
    while kit.replies.find(ME.owner, reply_id):
        timers.fire()
        await asyncio.sleep(0.001)
    assert [message["id"] for message in (await kit.api.open(ME, conversation))["messages"]] == [
        kit.path(conversation)[0].id
    ]


async def test_a_slow_write_never_overwrites_the_end(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, reply_id = await kit.send("slow")
    with Gate(kit, monkeypatch) as gate:
        watching = asyncio.create_task(kit.watch(reply_id))
        reply = await gate.reply_at_it(reply_id)
        stopping = []
        for _ in range(2):
            stopping.append(asyncio.ensure_future(kit.api.stop(ME, reply_id)))
            # Turns enough for the end to be written first, were it not in line.
            for _ in range(300):
                await asyncio.to_thread(lambda: None)
            assert kit.backend.active == 0
            assert not any(task.done() for task in stopping)
    await asyncio.gather(*stopping)
    assert (await watching)["status"] == "stopped"
    node = kit.node(conversation, reply_id)
    assert (node.status, node.text) == ("stopped", reply.node.text)


def work_label(view: dict[str, Any]) -> str:
    return english(view["work"]["label"]) if view["work"] else ""


@pytest.mark.parametrize("num_phases", [0, 1, 2, 3])
async def test_stop_in_every_phase(kit: ChatKit, num_phases: int) -> None:
    labels = (
        "Waiting in the queue, 1 ahead",
        "Reading images",
        "Encoding images, 50%",
        "Reading the prompt, 512/1,024",
    )
    conversation, reply_id = await kit.send("phases")
    for _ in range(num_phases):
        kit.backend.next_phase()
    await kit.watch(reply_id, until=lambda view: work_label(view).startswith(labels[num_phases]))
    await kit.api.stop(ME, reply_id)
    assert kit.backend.active == 0
    assert kit.node(conversation, reply_id).status == "stopped"


async def test_stop_just_as_it_ends_waits_for_its_end(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, reply_id = await kit.send("echo one two")
    with Gate(kit, monkeypatch) as gate:
        watching = asyncio.create_task(kit.watch(reply_id))
        reply = await gate.reply_at_it(reply_id)
        while kit.backend.active or reply.node.status == "running":
            await asyncio.sleep(0)
        stopping = asyncio.create_task(reply.stop())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not stopping.done(), "its end isn't stored yet"
    await stopping
    assert (await watching)["status"] == "finished"
    assert kit.node(conversation, reply_id).status == "finished"


async def test_stop_keeps_what_was_written(kit: ChatKit) -> None:
    conversation, reply_id = await kit.send("slow")
    shown = await kit.watch(reply_id, until=lambda view: view["blocks"])
    await asyncio.gather(kit.api.stop(ME, reply_id), kit.api.stop(ME, reply_id))
    node = kit.node(conversation, reply_id)
    assert node.status == "stopped"
    assert node.text.count("word") >= shown["blocks"][0].count("word") > 0


async def test_a_reply_that_nobody_watches_is_ended(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    conversation, never_watched = await kit.send("slow")
    timers.fire()
    assert (await kit.watch(never_watched))["status"] == "stopped"
    assert kit.backend.calls == []
    conversation, left = await kit.send("slow", conversation, never_watched)
    await kit.watch(left, until=lambda view: view["blocks"])
    assert kit.replies.of(ME.owner)
    timers.fire()
    # Not begun again: it is seen to its end.
    assert (await kit.watch(left))["status"] == "stopped"
    assert kit.node(conversation, left).status == "stopped"
    assert kit.backend.active == 0


async def test_a_reply_that_is_watched_again_goes_on(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    _, reply_id = await kit.send("slow")
    for _ in range(2):
        await kit.watch(reply_id, until=lambda view: view["blocks"])
        assert timers.live == 1
    views = kit.replies.watch(ME.owner, [reply_id])
    await views.__anext__()
    assert timers.live == 0
    timers.fire()
    assert not next(iter(kit.replies.of(ME.owner))).done
    await kit.api.stop(ME, reply_id)
    await views.aclose()  # pyright: ignore[reportAttributeAccessIssue]


async def test_two_pages_watch_one_reply(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    _, reply_id = await kit.send("phases")
    pages = [asyncio.create_task(kit.watch(reply_id)) for _ in range(2)]
    await kit.watch(reply_id, until=lambda view: "queue" in work_label(view))
    assert timers.live == 0
    for _ in range(4):
        kit.backend.next_phase()
    first, second = await asyncio.gather(*pages)
    assert first == second
    assert first["status"] == "finished"
    assert len(kit.backend.calls) == 1


async def test_a_reply_that_ended_unwatched_blocks_nothing(kit: ChatKit, monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    conversation, reply_id = await kit.send("phases")
    await kit.watch(reply_id, until=lambda view: view["work"])
    reply = kit.replies.find(ME.owner, reply_id)
    assert reply is not None
    for _ in range(4):
        kit.backend.next_phase()
    while not reply.done:
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # for what is called at its end
    assert kit.replies.of(ME.owner) == []
    assert (await kit.watch(reply_id))["status"] == "finished"
    timers.fire()
    assert kit.replies.find(ME.owner, reply_id) is None
    assert (await kit.ask("echo on", conversation, reply_id)).view["status"] == "finished"


async def test_nobody_watches_another_one_s_reply(kit: ChatKit) -> None:
    _, reply_id = await kit.send("echo mine")
    views = [view async for view in kit.replies.watch(OTHER.owner, [reply_id, "nothing"])]
    assert views == [{}]
    assert kit.backend.calls == []
    await kit.api.stop(OTHER, reply_id)
    assert (await kit.watch(reply_id))["status"] == "finished"


@pytest.mark.parametrize(
    ("question", "error", "too_long"),
    [
        ("refuse The picture is too small.", "The picture is too small.", False),
        ("break", r"Something went wrong inside the program; its log has it under \w{6}. You can try again.", False),
        ("too long", "The prompt has 5,000 tokens; the context holds 4,096.", True),
    ],
)
async def test_an_error_is_told_in_words(kit: ChatKit, question: str, error: str, too_long: bool) -> None:
    asked = await kit.ask(question)
    assert (asked.view["status"], asked.view["too_long"]) == ("failed", too_long)
    assert re.fullmatch(error, english(asked.view["error"]))
    node = kit.node(asked.conversation, asked.reply)
    assert (node.status, node.error) == ("failed", asked.view["error"])
    assert kit.backend.active == 0


async def test_an_error_names_the_person_s_file(kit: ChatKit) -> None:
    file = kit.attach(PICTURE, name="holiday.png")
    asked = await kit.ask(f"refuse '{file.digest}' is damaged", files=[file])
    assert english(asked.view["error"]) == "'holiday.png' is damaged"


async def test_thinking_is_kept_with_its_seconds(kit: ChatKit) -> None:
    asked = await kit.ask("think yes")
    assert "That is it." in asked.view["reasoning"][0]
    assert asked.view["thinking_s"] >= 0
    node = kit.node(asked.conversation, asked.reply)
    assert (node.reasoning, node.text.strip()) == ("Let me see. That is it.", "yes")
    assert node.thinking_s == asked.view["thinking_s"]
