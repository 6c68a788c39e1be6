"""The bundled model with an adapter, from a file to an answer and to what is cached."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qwen35mm import GenerationRequest, Image, LocalBackend, Message, Text
from qwen35mm.assets import demo_model_path
from qwen35mm.cache import CacheSettings
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
