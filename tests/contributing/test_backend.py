"""Kernels for another device are a module and a line in backend.py; another way to answer is a `Backend`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from qwen35mm.assets import demo_model_path
from qwen35mm.chat.store.store import ConversationStore
from qwen35mm.chat.store.temporary import TemporaryStore
from qwen35mm.contract import (
    Backend,
    Event,
    Finished,
    GenerationRequest,
    Message,
    ModelInfo,
    Result,
    SamplingParams,
    TextDelta,
)
from qwen35mm.http.sessions import HEADER
from qwen35mm.web.serving.app import PREFIX, build_app
from qwen35mm_preprocess import MediaProcessor
from tests.contributing.copies import Copy

CHOICE = "kernels/qwen35mm_kernels/backend.py"
KERNELS = '''"""The operations on a device of another kind."""

from qwen35mm_kernels import cpu, reference
from qwen35mm_kernels.cpu import *  # noqa: F403

__all__ = cpu.__all__


def swiglu(gate_up):
    """Its own operation; the others are torch's, which run anywhere."""
    return reference.swiglu(gate_up)
'''
TRIAL = """
import torch
from qwen35mm.cache.fingerprint import _device
from qwen35mm.model.layers import Factory, Linear
from qwen35mm_kernels import reference, select_backend
ops = select_backend("meta")
assert ops.__all__ == reference.__all__
device = torch.device("meta")
assert Linear(4, 4, Factory(torch.float32, device)).ops is ops
print(ops.__name__, _device(device)["kernels"], ops.swiglu.__module__, ops.swiglu(torch.tensor([[0.0, 1.0]])))
"""


def test_kernels_are_chosen_after_a_module_and_a_line(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    (tmp_path / "kernels/qwen35mm_kernels/other.py").write_text(KERNELS, "utf-8")
    line = "    if why_not is not None:\n"
    copy.edit(
        CHOICE,
        line,
        f'    if device_type == "meta":\n        from qwen35mm_kernels import other\n\n        return other\n{line}',
    )
    done = copy.run(TRIAL)
    assert done.stdout == "qwen35mm_kernels.other qwen35mm_kernels.other qwen35mm_kernels.other tensor([[0.]])\n", (
        done.stderr
    )


class Echo:
    """All that a page needs of what answers."""

    info = ModelInfo("Echo", SamplingParams(), False)
    media = MediaProcessor.from_pretrained(demo_model_path())
    is_demo = False
    idles = False
    context_length = 4096

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        text = request.messages[-1].text.upper()
        yield TextDelta(text)
        yield Finished(Result(text, None, "stop", (), (), 1, 1, None, None))

    def count_tokens(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        return sum(len(message.text) for message in messages)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        return True

    def memory(self) -> dict[str, Any]:
        return {}


async def test_the_page_answers_with_any_backend(tmp_path: Path) -> None:
    echo: Backend = Echo()
    page = build_app(
        echo, ConversationStore(tmp_path / "kept"), temporary=TemporaryStore(tmp_path / "temporary"), calls=False
    )
    transport = httpx.ASGITransport(page.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers={HEADER: ""}) as client:

        async def ask(name: str, **arguments: object) -> httpx.Response:
            answer = await client.post(f"{PREFIX}/{name}", json=arguments)
            assert answer.status_code == 200, answer.text
            return answer

        sent = (await ask("api/send", text="Hello")).json()
        # An answer begins when a page watches it.
        await ask("watch", answers=[sent["reply"]])
        chat = (await ask("api/open", conversation=sent["chat"]["id"])).json()
    assert [message["text"] for message in chat["messages"]] == ["Hello", "HELLO"]
