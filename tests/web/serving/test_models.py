"""What the page is told of a model before it is changed: in the planner's numbers, and what would fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.cli.chat import open_page
from qwen35mm.model_library import HUB_MODELS, BackendSwitch, memory
from qwen35mm.settings import ModelOptions, PageOptions
from qwen35mm.web import serve
from qwen35mm_preprocess.say import english
from tests.model_library.conftest import hub_cache
from tests.web.serving.test_servers import ask, changed, other, served, switch

__all__ = ["ask", "hub_cache", "other", "served", "switch"]

GIB = 1 << 30
TWO_B = "Qwen/Qwen3.5-2B"


@pytest.mark.usefixtures("hub_cache")
def test_a_plan_is_told_and_what_would_fit(ask: Any, switch: BackendSwitch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model in the catalogue, which isn't on this machine, without the network."""
    monkeypatch.setattr("qwen35mm.model_library.plan.download_config", None)
    # The numbers are those of a processor without AMX.
    monkeypatch.setattr("qwen35mm.engine.memory.uses_tiles", lambda dtype: False)
    monkeypatch.setattr("qwen35mm.model_library.memory.held_bytes", lambda device, planned: 0)
    monkeypatch.setattr(switch, "_available", lambda device: 4 * GIB)
    found = ask("plan", source=TWO_B, context_length=8_192)
    assert found["fits"]
    assert (found["context_length"], found["num_positions"], found["slots"]) == (8_192, 262_144, 2)
    # bf16 takes more than there is.
    assert [each["value"] for each in found["weights"]] == ["auto", "bf16", "int8", "int4"]
    assert english(found["weights"][0]["label"]) == "Automatic: int8"
    assert found["parts"]["weights"] == 2_663_892_608
    assert found["parts"]["kv"] == 8_192 * 12_288
    assert sum(found["parts"].values()) <= found["memory"] == 4 * GIB
    assert found["suggestion"] is None
    longest = found["largest_context"]

    # Longer by less than smaller weights save, then by more than those do.
    for length, weights, kv_dtype in ((longest + 64, "int4", "auto"), (150_000, "int4", "int8")):
        far = ask("plan", source=TWO_B, context_length=length, weights="int8")
        assert not far["fits"]
        assert far["parts"]["kept"] == 0
        settings = {name: far["suggestion"][name] for name in ("context_length", "weights", "kv_dtype")}
        assert settings == {"context_length": length, "weights": weights, "kv_dtype": kv_dtype}
        assert ask("plan", source=TWO_B, **settings)["fits"]
    most = ask("plan", source=TWO_B, context_length=262_144)["suggestion"]
    shorter = {name: most[name] for name in ("context_length", "weights", "kv_dtype")}
    assert ask("plan", source=TWO_B, **shorter)["fits"]

    monkeypatch.setattr(switch, "_available", lambda device: GIB)
    none = ask("plan", source=TWO_B)
    assert (none["fits"], none["largest_context"], none["suggestion"]) == (False, None, None)
    assert "has 262,144" in english(ask("plan", source=TWO_B, context_length=300_000))


@pytest.mark.usefixtures("hub_cache")
def test_the_start_offers_a_real_model_that_fits(
    ask: Any, switch: BackendSwitch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one on this machine, else one to download, without the network; none beside a real model."""
    monkeypatch.setattr("qwen35mm.web.serving.models.lacking_disk_bytes", lambda num_bytes: 0)
    monkeypatch.setattr(switch, "_available", lambda device: 100 * GIB)
    assert shown(ask) == (TWO_B, "4.3 GiB", "fits this machine", True)
    monkeypatch.setenv("QWEN35MM_MODELS", str(tmp_path / "models"))
    shutil.copytree(demo_model_path(), tmp_path / "models" / "my-finetune")
    assert shown(ask) == ("my-finetune", "12 MiB", "fits this machine", False)
    monkeypatch.setattr(switch, "_available", lambda device: -GIB)
    assert ask("start")["app"]["suggestion"] is None
    monkeypatch.setattr(switch, "_available", lambda device: 100 * GIB)
    monkeypatch.setattr("qwen35mm.backends.model_backend.demo_model_path", lambda: tmp_path)
    assert ask("start")["app"]["suggestion"] is None


def shown(ask: Any) -> tuple[str, str, str, bool]:
    """The start's suggestion in English."""
    offered = ask("start")["app"]["suggestion"]
    return offered["name"], english(offered["size"]), english(offered["fit"]), offered["is_new"]


def test_a_download_says_what_it_lacks_and_what_is_left_of_it(
    ask: Any, switch: BackendSwitch, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switch, "_available", lambda device: 100 * GIB)

    def two_b() -> str:
        return english(next(each["fit"] for each in ask("models")["downloads"] if each["source"] == TWO_B))

    def disk(free: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))

    disk(2 * GIB)
    assert two_b() == "needs 2.5 GiB more disk space"
    disk(100 * GIB)
    blobs = hub_cache / "models--Qwen--Qwen3.5-2B" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / "0123.qwen35mm.incomplete").open("wb") as file:
        file.truncate(GIB)
    assert two_b() == "fits this machine, 3.3 GiB still to download"
    assert english(ask("plan", source=TWO_B)["download"]) == "3.3 GiB to download."


@pytest.mark.usefixtures("hub_cache")
def test_the_list_measures_memory_once(
    ask: Any, switch: BackendSwitch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many models it has: each reading lists all mappings of the process."""
    monkeypatch.setenv("QWEN35MM_MODELS", str(tmp_path))
    monkeypatch.setattr(switch, "_available", memory.available_bytes)
    readings = []
    resident = memory.resident_bytes
    monkeypatch.setattr(memory, "resident_bytes", lambda: readings.append(1) or resident())
    for name in ("one", "two"):
        shutil.copytree(demo_model_path(), tmp_path / name)
        readings.clear()
        assert len(ask("models")["downloads"]) == len(HUB_MODELS)
        assert len(readings) <= 2


@pytest.mark.slow
def test_keys_and_values_are_changed_with_the_context(ask: Any, switch: BackendSwitch) -> None:
    before = ask("plan", context_length=512)["parts"]["kv"]
    assert changed(ask, context_length=1_024, kv_dtype="int8") is None
    assert "KV cache: int8; 1,024 tokens of context" in english(ask("start")["app"]["taken"])
    now = ask("plan", context_length=512)
    assert now["parts"]["kv"] == before * 17 // 32
    assert [each["value"] for each in now["kv_types"] if each["chosen"]] == ["int8"]
    keeps = ask("plan", context_length=512, kv_keep="0.70")["kv_keeps"]
    assert [(each["value"], each["chosen"]) for each in keeps][2:] == [("0.5", False), ("0.7", True)]
    assert changed(ask, context_length=512, kv_dtype="auto") is None
    assert "KV cache: float32; 512 tokens of context; 2 replies" in english(ask("start")["app"]["taken"])


def test_what_max_memory_picked_is_said_in_the_terminal_and_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "resident_bytes", lambda: 300 << 20)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 20 * GIB)
    model = ModelOptions(device="cpu", no_disk_cache=True, max_memory=562 << 20)
    with open_page(model, PageOptions(port=0, data_dir=tmp_path)) as (backend, how):
        (line,) = [each for each in caplog.messages if each.startswith("Within ")]
        server = serve(backend, **{**how, "token": ""})
        try:
            answer = httpx.post(f"{server.url}qwen35mm/api/start", headers={"x-qwen35mm": "1"}, json={})
            said = english(answer.json()["app"]["taken"])
        finally:
            server.close()
        length = backend.context_length
    assert f"int4 weights (5.0 MiB), a context of {length:,} tokens with KV as int8, 1 slots" in line
    assert said == (
        f"Weights: int4; KV cache: int8; {length:,} tokens of context; 1 reply at a time. Picked to fit "
        "--max-memory 562 MiB."
    )
