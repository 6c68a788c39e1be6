"""The bundled model with an adapter, from a file to an answer and to what is cached."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from qwen35mm import GenerationRequest, Image, LocalBackend, Message, Result, Text
from qwen35mm.assets import demo_model_path
from qwen35mm.cache import CacheSettings
from qwen35mm.errors import RequestError
from tests.backends.events import collect, result_of
from tests.backends.test_local import GREEDY, oracle_inputs, picture
from tests.oracle import greedy_reply, load_demo_oracle
from tests.peft_adapters import make_adapter
from tests.small_adapters import write_adapter


async def test_replies_equal_peft(tmp_path: Path) -> None:
    params = replace(GREEDY, max_tokens=12)
    original = load_demo_oracle()
    adapted = make_adapter(original, tmp_path, target_modules="all-linear", lora_alpha=16)
    messages = [Message("user", (Image(picture(1)), Text("What is in this picture?")))]
    with LocalBackend.load(demo_model_path(), device="cpu", dtype="float32", lora=tmp_path) as backend:
        result = result_of(await collect(backend.stream(GenerationRequest(messages, params))))
        given = result.prompt_token_ids, oracle_inputs(backend, messages)
    assert list(result.token_ids) == greedy_reply(adapted, *given, max_new_tokens=12)
    assert list(result.token_ids) != greedy_reply(original, *given, max_new_tokens=12)


def test_each_adapter_and_scale_has_a_cache_of_its_own(tmp_path: Path) -> None:
    adapter, roots, heads = write_adapter(tmp_path / "adapter"), [], []
    for lora in (None, adapter, f"{adapter}=0.5", [adapter, adapter], adapter, None):
        cache = CacheSettings(directory=tmp_path / "cache")
        with LocalBackend.load(demo_model_path(), device="cpu", weights="int8", lora=lora, cache=cache) as backend:
            roots.append(backend.engine._engine.runtime.root)
            # The files of packed weights, too.
            heads.append(backend.loaded.model.layers[0].mlp.down_proj.weight.data.sum().item())  # pyright: ignore
    assert roots[:2] == [roots[5], roots[4]]
    assert heads[:2] == [heads[5], heads[4]]
    assert len(set(roots)) == len(set(heads)) == 4
    write_adapter(adapter, lora_alpha=3)
    with LocalBackend.load(demo_model_path(), device="cpu", lora=adapter, cache=tmp_path / "cache") as backend:
        assert backend.engine._engine.runtime.root not in roots


async def test_each_row_of_a_batch_has_its_own(tmp_path: Path) -> None:
    """Alone and beside others, with a picture, to the bit; and as PEFT says."""
    params = replace(GREEDY, max_tokens=10, logprobs=0)
    original, names = load_demo_oracle(), ["a", "b", None]
    adapted = {
        "a": make_adapter(original, tmp_path / "a", 1, target_modules="all-linear", lora_alpha=40),
        "b": make_adapter(original, tmp_path / "b", 2, target_modules=["v_proj", "qkv", "in_proj_qkv"], lora_alpha=90),
        None: original,
    }
    messages = [Message("user", (Image(picture(1)), Text("What is in this picture?")))]
    lora = {name: tmp_path / name for name in names if name is not None}

    async def ask(backend: LocalBackend, name: str | None) -> Result:
        return result_of(await collect(backend.stream(GenerationRequest(messages, params, adapter=name))))

    with LocalBackend.load(demo_model_path(), device="cpu", dtype="float32", lora=lora, min_segment=16) as backend:
        assert backend.info.adapters == ("a", "b")
        together = await asyncio.gather(*(ask(backend, name) for name in [*names, "a"]))
        # Nothing computed under one is read under another. The two of "a" may share, whichever comes first.
        first, b, none, second = (each.cache.num_cached_tokens for each in together)
        assert (b, none, min(first, second)) == (0, 0, 0)
        again = [await ask(backend, name) for name in names]
        assert all(each.cache.num_cached_tokens for each in again)
        oracle = oracle_inputs(backend, messages)
        with pytest.raises(RequestError, match="There is no adapter 'c' here; there is a, b"):
            await ask(backend, "c")
        with pytest.raises(RequestError, match="There is no adapter 'c' here"):
            await collect(backend.stream_prompt("A red", params, adapter="c"))
    for name, beside, alone in zip([*names, "a"], together, [*again, again[0]], strict=True):
        assert (beside.token_ids, beside.logprobs) == (alone.token_ids, alone.logprobs), name
        expected = greedy_reply(adapted[name], beside.prompt_token_ids, oracle, max_new_tokens=10)
        assert list(beside.token_ids) == expected, name
    assert len({each.token_ids for each in again}) == 3


async def test_a_later_turn_continues_with_its_adapter(tmp_path: Path) -> None:
    params = replace(GREEDY, max_tokens=6)
    lora = {name: write_adapter(tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
    with LocalBackend.load(demo_model_path(), device="cpu", lora=lora, min_segment=16) as backend:
        chat = backend.chat()
        chat.ask("What is a circle? " * 8, params=params, adapter="a")
        backend.wait_idle()
        # The history that was computed meanwhile is the adapter's, too.
        asked = GenerationRequest([*chat.messages, Message("user", (Text("And a square?"),))], params)
        found = {name: result_of(await collect(backend.stream(replace(asked, adapter=name)))) for name in (None, *"ab")}
        assert [name for name, result in found.items() if result.cache.num_cached_tokens] == ["a"]
        assert found["a"].cache.num_cached_tokens > 40
