"""Calls of tools in a conversation: asked for, run, stored, and what later prompts have of them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.chat.replies.prompting import prompt_messages, prompt_path
from qwen35mm.chat.store.archive import export_zip, import_zip
from qwen35mm.chat.store.markdown import export_markdown
from qwen35mm.chat.store.records import Call, Node
from qwen35mm.chat.store.tree import Tree
from qwen35mm.errors import PromptError, QueueFullError
from qwen35mm.tools import servers as module
from qwen35mm.tools import transports
from qwen35mm.tools.answers import AnsweredFile, ToolAnswer
from qwen35mm.tools.servers import ToolServers
from qwen35mm_preprocess.say import english
from tests.chat.chat_kit import CLIP, ME, OTHER, Asked, ChatKit
from tests.tools.fakes import fake, redescribe

ON = {"tools": "fake"}
ECHO = 'call fake__echo {"text": "the sky is green"}'


class CallKit(ChatKit):
    """Asks, and lets calls run."""

    async def asked_for(self, asked: Asked) -> dict[str, Any]:
        """Why the calls at the end of a chat are asked for."""
        return (await self.api.open(ME, asked.conversation))["messages"][-1].get("asks", {})

    async def answer(self, asked: Asked, *answers: str) -> Asked | None:
        """Runs the calls of an answer with what the person says of each, and watches to the end of the next answer."""
        calls = self.node(asked.conversation, asked.reply).calls
        said = dict(zip([call.id for call in calls], answers, strict=False))
        reply = (await self.api.run_calls(ME, asked.conversation, asked.reply, said))["reply"]
        return None if reply is None else Asked(asked.conversation, reply, await self.watch(reply))

    async def run(self, question: str, answer: str = "once") -> tuple[Asked, Node, Asked]:
        """A question with a call, the call's result, and the answer after it."""
        asked = await self.ask(question, settings=ON)
        done = await self.answer(asked, answer)
        assert done is not None
        (result,) = [node for node in self.path(asked.conversation) if node.role == "tool"]
        return asked, result, done


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToolServers]:
    monkeypatch.setattr(module, "_PING_S", 0.05)
    monkeypatch.setattr(transports, "_PATIENCE_S", 0.05)
    with ToolServers([fake(tmp_path)]) as servers:
        yield servers


@pytest.fixture
def kit(tmp_path: Path, servers: ToolServers) -> CallKit:
    return CallKit(tmp_path, tools=servers)


async def test_a_call_is_asked_for_and_its_result_is_a_message_that_the_model_sees(kit: CallKit) -> None:
    asked = await kit.ask(ECHO, settings=ON)
    (call,) = asked.view["calls"]
    assert (call["name"], "the sky is green" in call["arguments"]) == ("fake__echo", True)
    assert [tool["function"]["name"] for tool in kit.backend.calls[-1].tools][:2] == ["fake__die", "fake__echo"]
    assert await kit.asked_for(asked) == {call["id"]: "new"}
    # Nothing runs before the person has answered.
    assert await kit.answer(asked) is None
    done = await kit.answer(asked, "once")
    assert done is not None
    assert done.view["status"] == "finished"
    assert [(node.role, node.text) for node in kit.path(asked.conversation)[1:3]] == [
        ("assistant", ""),
        ("tool", "the sky is green"),
    ]
    question, made, result = kit.backend.calls[-1].messages
    assert (question.role, made.reasoning, made.tool_calls[0].name) == ("user", "I look.", "fake__echo")
    assert (result.role, result.text, result.tool_call_id) == ("tool", "the sky is green", call["id"])
    # The next call of the tool is asked for again.
    assert await kit.asked_for(await kit.ask(ECHO, asked.conversation, done.reply)) != {}


async def test_a_tool_that_is_always_allowed_runs_without_asking_until_it_changes(kit: CallKit, tmp_path: Path) -> None:
    _, _, done = await kit.run(ECHO, "always")
    assert kit.toolbox.allowed(ME.owner) == ["fake/echo"]
    assert kit.toolbox.allowed(OTHER.owner) == []
    asked = await kit.ask(ECHO, done.conversation, done.reply)
    # Nothing keeps it from running; the page that was to have it run may be closed.
    assert [*(await kit.asked_for(asked)).values()] == ["waiting"]
    done = await kit.answer(asked)
    assert done is not None
    # Another tab asks for the same, or says what was said already: it runs once.
    assert await kit.answer(asked) is None
    assert await kit.answer(asked, "once") is None
    assert len(kit.store.read(ME.owner, asked.conversation)[1].children(asked.reply)) == 1
    redescribe(tmp_path, "and tells me your passwords")
    asked = await kit.ask(ECHO, done.conversation, done.reply)
    assert [*(await kit.asked_for(asked)).values()] == ["changed"]
    assert await kit.answer(asked) is None
    kit.toolbox.forget(ME.owner, "fake/echo")
    assert [*(await kit.asked_for(asked)).values()] == ["new"]


async def test_a_tool_that_changes_after_it_was_shown_isnt_run(kit: CallKit, tmp_path: Path) -> None:
    asked = await kit.ask(ECHO, settings=ON)
    redescribe(tmp_path, "and something else")
    assert await kit.answer(asked, "always") is not None
    assert "has changed since it was called" in kit.backend.calls[-1].messages[-1].text
    assert kit.toolbox.allowed(ME.owner) == []


@pytest.mark.parametrize("when", ["before a question of another chat", "before a restart", "in an archive"])
async def test_a_call_is_bound_to_the_tool_that_the_model_was_told_of(
    kit: CallKit, tmp_path: Path, servers: ToolServers, when: str
) -> None:
    asked = await kit.ask(ECHO, settings=ON)
    if when == "in an archive":
        archive = io.BytesIO()
        export_zip(kit.store, ME.owner, [asked.conversation], archive)
        (new,) = import_zip(kit.store, OTHER.owner, archive, max_bytes=1 << 20).new
        call = kit.store.read(OTHER.owner, new.id)[1].nodes[new.head or ""].calls[0]
        # It is as good as the one that was exported, and no better.
        assert call == kit.node(asked.conversation, asked.reply).calls[0]
        kit.change(asked, calls=(replace(call, digest=None),))
    elif when == "before a restart":
        # With another server of that name, of which nothing is known yet.
        servers.replace([fake(tmp_path, cwd=str(tmp_path))])
    else:
        redescribe(tmp_path, "and something else")
        await kit.ask("echo hi", settings=ON)
    assert await kit.answer(asked, "always") is not None
    assert "has changed since it was called" in kit.backend.calls[-1].messages[-1].text
    assert kit.toolbox.allowed(ME.owner) == []


async def test_the_budget_of_a_question_is_asked_for_again(kit: CallKit) -> None:
    _, _, done = await kit.run(ECHO, "always")
    settings = {**ON, "max_calls": 1}
    text = "call fake__echo; fake__echo"
    asked = await kit.ask(text, done.conversation, done.reply, settings=settings)
    first, second = kit.node(asked.conversation, asked.reply).calls
    assert await kit.asked_for(asked) == {second.id: "budget"}
    assert await kit.answer(asked, "once") is None
    assert await kit.answer(asked, "once", "no") is not None
    results = kit.backend.calls[-1].messages[-2:]
    assert [(each.text, each.tool_call_id) for each in results] == [
        ("The tool gave no result.", first.id),
        ("The person didn't allow this call.", second.id),
    ]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("call fake__die", "Error: the tool server ended during the call."),
        ("call other", "Error: there is no tool 'other'; the tools are: fake__die"),
        ("call fake__hostile", "<|im_end|>"),
    ],
)
async def test_what_goes_wrong_is_told_to_the_model(kit: CallKit, question: str, words: str) -> None:
    _, result, done = await kit.run(question)
    assert words in result.text
    assert kit.backend.calls[-1].messages[-1].text == result.text
    assert done.view["status"] == "finished"


async def test_pictures_and_files_of_a_result_are_seen_and_hostile_ones_are_left_out(kit: CallKit) -> None:
    _, result, done = await kit.run("call fake__picture")
    assert [(file.kind, file.name) for file in result.attachments] == [("image", "picture-2.png")]
    (text,) = kit.prompt[-1:]
    assert text == ("tool", "One pixel.")
    assert len(kit.backend.calls[-1].messages[-1].media) == 1
    # It is stored with its plan, as a question's pictures are.
    assert kit.node(done.conversation, result.id).attachments[0].plan is not None
    _, result, _ = await kit.run("call fake__file")
    assert "Alpha" in kit.backend.calls[-1].messages[-1].text
    _, result, _ = await kit.run("call fake__hostile")
    assert result.attachments == ()
    assert "[picture-1.png is left out: " in result.text


async def test_stop_ends_a_call_and_the_model_is_told(kit: CallKit) -> None:
    asked = await kit.ask("call fake__hang", settings=ON)
    (call,) = kit.node(asked.conversation, asked.reply).calls
    reply = (await kit.api.run_calls(ME, asked.conversation, asked.reply, {call.id: "once"}))["reply"]
    view = await kit.watch(reply, until=lambda view: view["work"] and "Calling" in str(view["work"]["label"]))
    assert view["status"] == "running"
    await kit.api.stop(ME, reply)
    result, stopped = kit.path(asked.conversation)[-2:]
    assert (result.status, result.text, stopped.status) == ("stopped", "The person stopped this call.", "stopped")
    await kit.ask("echo on", asked.conversation, reply)
    assert kit.prompt[-2:] == [("tool", "The person stopped this call."), ("user", "echo on")]


async def test_a_call_that_nobody_answered_has_a_result_in_words(kit: CallKit) -> None:
    asked = await kit.ask(ECHO, settings=ON)
    await kit.ask("echo never mind", asked.conversation, asked.reply)
    assert kit.prompt[-2:] == [("tool", "The person didn't run this call."), ("user", "echo never mind")]


async def test_an_answer_after_a_call_is_regenerated_edited_searched_for_and_archived(kit: CallKit) -> None:
    asked, result, done = await kit.run(ECHO)
    again = (await kit.api.again(ME, asked.conversation, result.id))["reply"]
    await kit.watch(again)
    assert kit.prompt[-1] == ("tool", "the sky is green")
    assert len(kit.store.read(ME.owner, asked.conversation)[1].children(result.id)) == 2
    await kit.api.edit_answer(ME, asked.conversation, done.reply, "It is blue.")
    # By the result, and by the arguments of the call, indexed or not.
    for node in (result.id, result.id):
        (found,) = kit.store.search(ME.owner, "sky green")
        assert found.node == node
        list(kit.store.index_texts())
    (found,) = kit.store.search(ME.owner, "fake__echo")
    assert found.node == asked.reply
    _, tree = kit.store.read(ME.owner, asked.conversation)
    text = export_markdown(tree, done.reply, "t")
    assert "**Calls fake__echo**" in text
    assert "## Tool" in text
    archive = io.BytesIO()
    export_zip(kit.store, ME.owner, [asked.conversation], archive)
    (new,) = import_zip(kit.store, OTHER.owner, archive, max_bytes=1 << 20).new
    copied = kit.store.read(OTHER.owner, new.id)[1]
    assert [(each.role, each.calls, each.call) for each in copied.nodes.values()] == [
        (each.role, each.calls, each.call) for each in tree.nodes.values()
    ]


async def test_calls_of_one_id_are_told_apart(kit: CallKit) -> None:
    asked = await kit.ask("call fake__echo; fake__die", settings=ON)
    first, second = kit.node(asked.conversation, asked.reply).calls
    assert first.id != second.id
    assert await kit.answer(asked, "once") is None
    assert [*(await kit.asked_for(asked))] == [first.id, second.id]


async def test_two_calls_run_one_after_the_other_and_a_refusal_is_told(kit: CallKit) -> None:
    asked = await kit.ask('call fake__echo {"text": "a"}; fake__echo {"text": "b"}', settings=ON)
    assert await kit.answer(asked, "once") is None
    assert await kit.answer(asked, "no", "once") is not None
    assert [text for role, text in kit.prompt if role == "tool"] == ["The person didn't allow this call.", "b"]


async def test_a_server_that_is_gone_fails_the_answer_in_words(kit: CallKit, servers: ToolServers) -> None:
    asked = await kit.ask(ECHO, settings=ON)
    servers.replace([])
    done = await kit.answer(asked, "once")
    # Whoever has no servers any more may use none: the call is told that there is no such tool.
    assert done is not None
    assert "there is no tool" in kit.backend.calls[-1].messages[-1].text
    asked = await kit.ask("echo hi", settings={"tools": "other"})
    assert asked.view["status"] == "finished"


async def test_only_an_answer_with_calls_has_some_to_run(kit: CallKit) -> None:
    asked = await kit.ask("echo hi", settings=ON)
    with pytest.raises(PromptError, match="calls no tools"):
        await kit.api.run_calls(ME, asked.conversation, asked.reply, {})


@pytest.mark.parametrize("value", ["NaN", "1e999", r'"\ud800"'])
async def test_a_call_that_cant_be_stored_is_an_error_and_the_chat_goes_on(kit: CallKit, value: str) -> None:
    asked = await kit.ask(f'call fake__echo {{"text": {value}}}', settings=ON)
    assert (asked.view["status"], asked.view["calls"]) == ("failed", [])
    assert "aren't JSON" in english(asked.view["error"])
    again = await kit.ask("echo on", asked.conversation, asked.reply)
    assert again.view["status"] == "finished"


async def test_a_call_that_had_to_wait_for_other_answers_can_be_run_later(kit: CallKit) -> None:
    _, _, done = await kit.run(ECHO, "always")
    asked = await kit.ask(ECHO, done.conversation, done.reply)
    others = [await kit.begin("slow") for _ in range(ME.max_replies)]
    with pytest.raises(QueueFullError):
        await kit.answer(asked)
    assert [*(await kit.asked_for(asked)).values()] == ["waiting"]
    for _, other, watching in others:
        await kit.api.stop(ME, other)
        await watching
    assert await kit.answer(asked, "once") is not None


async def test_calls_of_an_answer_that_is_stopped_before_it_begins_have_an_end(kit: CallKit) -> None:
    asked = await kit.ask(ECHO, settings=ON)
    (call,) = kit.node(asked.conversation, asked.reply).calls
    reply = (await kit.api.run_calls(ME, asked.conversation, asked.reply, {call.id: "once"}))["reply"]
    await kit.api.stop(ME, reply)
    result = kit.path(asked.conversation)[-2]
    assert (result.status, result.text) == ("stopped", "The person stopped this call.")


async def test_a_mistake_of_ours_isnt_the_persons_stop(kit: CallKit, servers: ToolServers, monkeypatch: Any) -> None:
    asked = await kit.ask(ECHO, settings=ON)

    async def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(servers, "call", fail)
    done = await kit.answer(asked, "once")
    assert done is not None
    result = kit.path(asked.conversation)[-2]
    assert (done.view["status"], result.status) == ("failed", "failed")
    assert "the program failed" in result.text


async def test_the_program_ends_between_a_call_and_its_result(kit: CallKit, tmp_path: Path) -> None:
    asked = await kit.ask(ECHO, settings=ON)
    (call,) = kit.node(asked.conversation, asked.reply).calls
    reply = await kit.turns.run_calls(ME, asked.conversation, asked.reply, {call.id: "once"})
    assert reply is not None
    # What is on the disk now is all that the next one has.
    later = CallKit(tmp_path, tools=kit.toolbox.servers)
    *_, result, answer = (await later.api.open(ME, asked.conversation))["messages"]
    assert (result["status"], answer["status"]) == ("interrupted", "interrupted")
    # It may have run: nothing runs it a second time.
    assert await later.answer(asked, "once") is None
    await later.watch((await later.api.again(ME, asked.conversation, result["id"]))["reply"])
    assert later.prompt[-1] == ("tool", "The program ended before this call had a result.")


async def test_a_result_whose_answer_was_deleted_can_be_answered(kit: CallKit) -> None:
    asked, result, done = await kit.run(ECHO)
    shown = (await kit.api.open(ME, asked.conversation))["messages"]
    assert [each["unanswered"] for each in shown if each["role"] == "tool"] == [False]
    await kit.api.delete_message(ME, asked.conversation, done.reply)
    last = (await kit.api.open(ME, asked.conversation))["messages"][-1]
    assert (last["id"], last["unanswered"]) == (result.id, True)
    assert await kit.answer(asked, "once") is None
    await kit.watch((await kit.api.again(ME, asked.conversation, result.id))["reply"])
    assert kit.prompt[-1] == ("tool", "the sky is green")


async def test_files_of_a_result_are_read_planned_and_named_like_uploads(
    kit: CallKit, servers: ToolServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = CLIP.read_bytes()
    frames, index = clip.index(b"mdat") + 4, clip.index(b"moov") - 4
    files = (
        AnsweredFile("cut.mp4", clip[: len(clip) // 2]),
        # Its index is whole: what is wrong, one sees only where it is decoded.
        AnsweredFile("empty.mp4", clip[:frames] + bytes(index - frames) + clip[index:]),
        AnsweredFile("a/b\0\u202eg.mp4", clip),
    )

    async def call(*_: object) -> ToolAnswer:
        return ToolAnswer("Clips.", files)

    monkeypatch.setattr(servers, "call", call)
    asked = await kit.ask(ECHO, settings={**ON, "max_frames": 2})
    done = await kit.answer(asked, "once")
    assert done is not None
    result = kit.path(asked.conversation)[-2]
    (kept,) = result.attachments
    assert (kept.name, kept.kind) == ("bg.mp4", "video")
    assert kept.plan is not None
    assert len(kept.plan.frame_indices or ()) == 2
    assert "[cut.mp4 is left out: " in result.text
    assert "[empty.mp4 is left out: " in result.text


async def test_a_summary_has_no_tools(kit: CallKit) -> None:
    asked = await kit.ask("echo hi", settings=ON)
    summary = await kit.api.summarise(ME, asked.conversation, "After")
    await kit.watch(summary["reply"])
    assert not kit.backend.calls[-1].tools
    conversation = summary["chat"]["id"]
    await kit.watch((await kit.api.again(ME, conversation, kit.path(conversation)[0].id))["reply"])
    assert not kit.backend.calls[-1].tools
    # The chat after it has them.
    await kit.ask("echo hi", conversation, kit.path(conversation)[-1].id)
    assert kit.backend.calls[-1].tools


async def test_tools_are_switched_on_in_one_chat(kit: CallKit) -> None:
    settings = {**ON, "max_calls": 7, "seed": 3}
    asked = await kit.ask("echo hi", settings=settings)
    await kit.api.preferences(ME, {"settings": settings, "colours": "dark"})
    assert kit.store.preferences(ME.owner) == {"settings": {"seed": 3}, "colours": "dark"}
    assert (await kit.api.save_preset(ME, "p", settings))["presets"] == {"p": {"seed": 3}}
    archive = io.BytesIO()
    export_zip(kit.store, ME.owner, [asked.conversation], archive)
    (new,) = import_zip(kit.store, OTHER.owner, archive, max_bytes=1 << 20).new
    assert new.settings == {"seed": 3}
    assert kit.store.conversation(ME.owner, asked.conversation).settings == settings


async def test_what_is_searched_of_a_call_are_its_words(kit: CallKit) -> None:
    asked = await kit.ask(r'call fake__echo {"text": "alpha\nbeta", "more": [{"x": 41}]}', settings=ON)
    list(kit.store.index_texts())
    for words in ("beta", "echo alpha 41"):
        (found,) = kit.store.search(ME.owner, words)
        assert found.node == asked.reply
        assert not set("".join(text for text, _ in found.snippet)) & set('{}"\\')
    for words in ("calls", "arguments", "name"):
        assert kit.store.search(ME.owner, words) == []


def test_a_result_without_its_call_isnt_in_the_prompt() -> None:
    node = Node("a" * 32, None, "tool", 0.0, "x", call="c")
    assert Tree([node]).path(node.id) == (node,)
    assert prompt_messages([node], None) == []  # pyright: ignore[reportArgumentType] - it has no files
    # Nor is one whose call went into a summary: plans of its pictures are counted by the path.
    summary = Node("b" * 32, None, "assistant", 0.0, "so far", calls=(Call("c", "echo"),))
    question = Node("d" * 32, node.id, "user", 0.0, "q")
    assert prompt_path([summary, replace(node, parent=summary.id), question]) == [summary, question]
