"""Conversations that are longer than the context, and media whose plans stay as they were first made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qwen35mm.chat.replies.turns import Once, Question, SentFile, TooLongError
from qwen35mm.errors import Qwen35mmError, RequestError
from qwen35mm_preprocess.say import english
from tests.chat.chat_kit import CLIP, ME, PICTURE, Asked, ChatKit
from tests.chat.helpers import create, files_in


def question(text: str, asked: Asked, **fields: Any) -> Question:
    return Question(conversation=asked.conversation, parent=asked.reply, text=text, **fields)


async def talk(kit: ChatKit, num_turns: int, num_chars: int) -> Asked:
    asked = await kit.ask("echo 0 " + "x" * num_chars)
    for number in range(1, num_turns):
        asked = await kit.ask(f"echo {number} " + "x" * num_chars, asked.conversation, asked.reply)
    return asked


async def test_oldest_messages_are_left_out_as_offered(kit: ChatKit) -> None:
    asked = await talk(kit, 4, 1600)
    before = kit.store.read(ME.owner, asked.conversation)[1].nodes
    with pytest.raises(TooLongError, match=r"would take 4,\d\d\d tokens.* holds 4,096, and 128 of") as caught:
        await kit.send("echo more " + "y" * 4000, asked.conversation, asked.reply)
    offers = {offer["kind"]: offer for offer in caught.value.offers}
    assert set(offers) == {"shorten", "summary"}
    assert kit.store.read(ME.owner, asked.conversation)[1].nodes == before
    await kit.api.shorten(ME, asked.conversation, offers["shorten"]["first"])
    sent = await kit.ask("echo more " + "y" * 4000, asked.conversation, asked.reply)
    assert sent.view["status"] == "finished"
    num_dropped = int(english(offers["shorten"]["label"]).split()[3])
    assert len(kit.prompt) == 9 - num_dropped
    chat = await kit.api.open(ME, asked.conversation)
    assert [message["kept"] for message in chat["messages"]] == [False] * num_dropped + [True] * (10 - num_dropped)
    await kit.api.shorten(ME, asked.conversation, None)
    chat = await kit.api.open(ME, asked.conversation)
    assert all(message["kept"] for message in chat["messages"])


async def test_what_is_taken_for_one_message_holds_for_it_alone(kit: ChatKit) -> None:
    """Also when it is answered again, or its answer continued."""
    asked = await talk(kit, 4, 1600)
    conversation, long = asked.conversation, "length " + "y" * 4000
    (offer,) = (
        each for each in (await kit.turns.measure(ME, question(long, asked)))["offers"] if each["kind"] == "shorten"
    )
    once = Once(first=offer["first"], limits={"max_image_tokens": 9})
    picture = kit.attach(PICTURE)
    files = [SentFile(digest=picture.digest, kind="image", name="a.png")]
    asking = question(long, asked, once=once, attachments=files, settings={"seed": 3})
    assert (await kit.turns.measure(ME, asking))["fits"]
    _, reply_id = await kit.turns.send(ME, asking)
    await kit.watch(reply_id)
    sent = kit.backend.calls[-1].messages
    assert kit.prompt[0] == ("user", kit.store.read(ME.owner, conversation)[1].nodes[offer["first"]].text.strip())
    assert sent[-1].media[0].plan.num_prompt_tokens <= 9
    again = await kit.turns.answer_again(ME, conversation, kit.path(conversation)[-2].id)
    await kit.watch(again)
    assert kit.backend.calls[-1].messages == sent
    await kit.watch(await kit.turns.go_on(ME, conversation, again))
    assert kit.backend.calls[-1].messages[:-1] == sent
    # Later messages have all again.
    kept = kit.store.conversation(ME.owner, conversation)
    assert (kept.first, kept.settings) == (None, {"seed": 3})
    later = question("echo on", Asked(conversation, again, {}))
    assert not (await kit.turns.measure(ME, later))["fits"]
    chat = await kit.api.open(ME, conversation)
    assert all(message["kept"] for message in chat["messages"])
    assert [message.get("left_out", 0) for message in chat["messages"] if message["role"] == "user"] == [0, 0, 0, 0, 2]


async def test_only_limits_of_media_hold_for_one_message(kit: ChatKit) -> None:
    for limits, words in (({"seed": 3}, "only its media limits"), ({"max_frames": -1}, "from 1 to")):
        with pytest.raises(Qwen35mmError, match=words):
            await kit.turns.measure(ME, Question(text="x", once=Once(limits=limits)))


async def test_an_answer_that_is_being_continued_counts_once(kit: ChatKit) -> None:
    asked = await kit.ask("length " + "y" * 1600)
    before = (await kit.turns.measure(ME, question("echo on", asked)))["tokens"]
    await kit.turns.go_on(ME, asked.conversation, asked.reply)
    assert (await kit.turns.measure(ME, question("echo on", asked)))["tokens"] == before
    await kit.api.stop(ME, asked.reply)


async def test_a_new_chat_begins_with_a_summary(kit: ChatKit) -> None:
    asked = await talk(kit, 2, 100)
    kit.store.change(ME.owner, asked.conversation, title="Shapes")
    kit.store.change(ME.owner, asked.conversation, settings={"system": "Be short."})
    conversation, reply_id = await kit.turns.summarise(ME, asked.conversation, "After: Shapes")
    view = await kit.watch(reply_id)
    assert view["status"] == "finished"
    (system, question) = kit.backend.calls[-1].messages
    assert system.text == "Be short."
    assert "echo 0 xxx" in question.text
    assert "Summarise" in question.text
    assert kit.store.read(ME.owner, conversation)[0].title == "After: Shapes"
    summary = kit.node(conversation, reply_id).text.strip()
    await kit.ask("echo on", conversation, reply_id)
    assert kit.prompt == [
        ("system", f"Be short.\n\nA summary of the conversation so far:\n\n{summary}"),
        ("user", "echo on"),
    ]


async def test_a_summary_holds_the_newest_messages_that_fit(kit: ChatKit, tmp_path: Path) -> None:
    asked = await talk(kit, 6, 1000)
    kit.backend.context_length = 1500
    await kit.turns.summarise(ME, asked.conversation, "After: Shapes")
    reply = kit.replies.of(ME.owner)[0]
    text = reply.work.request.messages[-1].text
    assert "echo 5" in text
    assert "echo 0" not in text.partition("## ")[2]
    assert kit.backend.count_tokens(reply.work.request.messages) <= 1500
    await reply.stop()
    assert len(files_in(tmp_path / "media")) == 1, "what was tried and didn't fit was never kept"


async def test_a_cut_or_repeated_summary_is_still_one(kit: ChatKit) -> None:
    asked = await talk(kit, 1, 10)
    conversation, reply_id = await kit.turns.summarise(ME, asked.conversation, "After: Shapes")
    await kit.watch(reply_id)
    kit.store.update(ME.owner, replace(kit.node(conversation, reply_id), status="length"))
    await kit.turns.go_on(ME, conversation, reply_id)
    await kit.watch(reply_id)
    assert [role for role, _ in kit.prompt] == ["user", "assistant"]
    other = await kit.turns.answer_again(ME, conversation, kit.path(conversation)[0].id)
    await kit.watch(other)
    assert [role for role, _ in kit.prompt] == ["user"]
    await kit.ask("echo on", conversation, other)
    assert [role for role, _ in kit.prompt] == ["system", "user"]


async def test_nothing_can_t_be_summed_up(kit: ChatKit) -> None:
    empty = create(kit.store, ME.owner)
    with pytest.raises(RequestError, match="nothing to summarise"):
        await kit.turns.summarise(ME, empty.id, "After: Shapes")
    asked = await talk(kit, 1, 4000)
    kit.backend.context_length = 300
    with pytest.raises(RequestError, match="Not even the last message"):
        await kit.turns.summarise(ME, asked.conversation, "After: Shapes")
    assert len(kit.store.find(ME.owner)) == 2


async def test_plans_stay_as_they_were_first_made(kit: ChatKit) -> None:
    kit.backend.completes_plans = True
    first = await kit.ask("look", files=[kit.attach(PICTURE), kit.attach(CLIP, kind="video")])
    plans = [attachment.plan for attachment in kit.path(first.conversation)[0].attachments]
    assert [plan.kind if plan and plan.digest else None for plan in plans] == ["image", "video"]
    await kit.ask("echo on", first.conversation, first.reply, settings={"max_image_tokens": 10, "max_frames": 2})
    question = kit.backend.calls[-1].messages[0]
    assert [part.plan for part in question.media] == plans


async def test_an_edited_message_keeps_its_files_plans(kit: ChatKit) -> None:
    kit.backend.completes_plans = True
    picture = kit.attach(PICTURE)
    first = await kit.ask("look", files=[picture])
    plan = kit.path(first.conversation)[0].attachments[0].plan
    assert plan is not None
    assert plan.digest
    await kit.ask("look again", first.conversation, files=[picture])
    assert kit.backend.calls[-1].messages[0].media[0].plan == plan
    await kit.ask("look closely", first.conversation, files=[picture], settings={"max_image_tokens": 4})
    smaller = kit.backend.calls[-1].messages[0].media[0].plan
    assert smaller is not None
    assert (smaller.digest, smaller.num_prompt_tokens <= 4) == (None, True)


async def test_notes_name_the_file_and_come_once_an_answer(kit: ChatKit, tmp_path: Path) -> None:
    pages = [Image.new("RGB", (64, 64), color) for color in ("red", "blue")]
    pages[0].save(tmp_path / "scan.tiff", save_all=True, append_images=pages[1:])
    scan = kit.attach(tmp_path / "scan.tiff", name="my scan.tiff")
    kit.backend.completes_plans = True
    first = await kit.ask("look", files=[scan])
    assert list(map(english, first.view["notes"])) == ["'my scan.tiff' holds 2 pictures; the first is used."]
    assert kit.node(first.conversation, first.reply).notes == tuple(first.view["notes"])
    second = await kit.ask("echo on", first.conversation, first.reply)
    assert second.view["notes"] == []
    edited = await kit.ask("look there", first.conversation, files=[scan])
    assert edited.view["notes"] == first.view["notes"]
