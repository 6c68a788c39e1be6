"""Budgets: the numbers of the family's memory table, the choices, and the refusals with their arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import make_random
from qwen35mm.cache import planner
from qwen35mm.cache.kv_types import check_kv_formats, kv_formats_of
from qwen35mm.cache.planner import CacheSettings, MemoryPlan, cgroup_limits, host_memory_bytes, plan_memory
from qwen35mm.config import ModelConfig
from qwen35mm.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def config_of(size: str) -> ModelConfig:
    return ModelConfig.from_dict(make_random.make_config(size, "bfloat16"))


def plan(size: str = "0.8B", **changes: Any) -> MemoryPlan:
    options: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "device": CPU,
        "num_slots": 4,
        "context_length": 32_768,
        "block_size": 64,
        "settings": CacheSettings(),
        "available_bytes": 24 * GIB,
    }
    return plan_memory(config_of(size), **{**options, **changes})


@pytest.mark.parametrize(
    ("length", "mib"), [(4_096, 80), (32_768, 640), (65_536, 1_280), (131_072, 2_560), (262_144, 5_120)]
)
def test_kv_of_a_context_of_35b(length, mib):
    """A budget of exactly these bytes holds one context, and one byte less doesn't."""
    settings = CacheSettings(kv_bytes=mib * MIB)
    assert plan("35B-A3B", context_length=length, settings=settings).num_kv_tokens == length
    with pytest.raises(ConfigError, match="KV budget is too small"):
        plan("35B-A3B", context_length=length, settings=CacheSettings(kv_bytes=mib * MIB - 1))


def test_choices_on_a_cpu():
    chosen = plan(available_bytes=24 * GIB)
    assert chosen.num_kv_tokens == 2 * GIB // (64 * 12 * KIB) * 64
    assert chosen.kv_bytes == chosen.num_kv_tokens * 12 * KIB <= 2 * GIB
    assert (chosen.state_bytes, chosen.vision_bytes, chosen.host_kv_bytes) == (GIB, 256 * MIB, 0)
    smaller = plan(available_bytes=8 * GIB)
    assert smaller.kv_bytes == pytest.approx(GIB, rel=0.001)
    assert smaller.state_bytes == 512 * MIB
    # At least one context, and eight states.
    least = plan("9B", available_bytes=4 * GIB)
    assert least.num_kv_tokens == 32_768
    assert least.kv_bytes == GIB > 4 * GIB // 8
    assert least.state_bytes == 8 * config_of("9B").state_bytes(torch.bfloat16) > 4 * GIB // 16


def test_choices_on_a_gpu(monkeypatch):
    monkeypatch.setattr(planner, "host_memory_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 24 * GIB))
    asked = plan("9B", device=CUDA, available_bytes=None)
    assert asked.kv_bytes == 10 * GIB
    assert asked.num_kv_tokens == 10 * GIB // (32 * KIB)
    assert (asked.state_bytes, asked.host_kv_bytes) == (GIB, 8 * GIB)
    one_state = config_of("9B").state_bytes(torch.bfloat16)
    assert asked.device_state_bytes == 16 * one_state
    assert asked.device_bytes == asked.kv_bytes + (5 + 16) * one_state
    assert f"{16 * one_state / MIB:.1f} MiB of them also there" in asked.describe()
    assert asked == plan("9B", device=CUDA, available_bytes=20 * GIB)
    # Half of 1.5 GiB is less than a context of 1 GiB.
    small = plan("9B", device=CUDA, available_bytes=3 * GIB // 2)
    assert small.num_kv_tokens == 32_768
    # States on the card take what is left, and hold nothing up.
    assert small.device_state_bytes == 3 * GIB // 2 // 16
    tight = plan("9B", device=CUDA, available_bytes=GIB + 5 * one_state + 7)
    assert (tight.num_kv_tokens, tight.device_state_bytes) == (32_768, 7)
    assert (
        plan("9B", device=CUDA, available_bytes=20 * GIB, settings=CacheSettings(reuse=False)).device_state_bytes == 0
    )
    assert plan("9B").device_state_bytes == 0


def test_several_devices_are_filled_up_to_the_one_with_the_least_room(monkeypatch):
    free = {0: 20 * GIB, 1: 20 * GIB}
    monkeypatch.setattr(planner, "host_memory_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index], 24 * GIB))
    cards = [torch.device("cuda", index) for index in range(2)]
    alone = plan("9B", device=CUDA, available_bytes=None, settings=CacheSettings())
    # 9B has 32 layers; every fourth is an attention layer.
    halves = plan("9B", device=[cards[0]] * 16 + [cards[1]] * 16, available_bytes=None)
    assert halves.kv_bytes == 2 * alone.kv_bytes
    assert (halves.device, halves.device_state_bytes) == ("cuda:0, cuda:1", 0)
    free[1] = 5 * GIB
    assert plan("9B", device=[cards[0]] * 16 + [cards[1]] * 16, available_bytes=None).kv_bytes == alone.kv_bytes // 2
    # A device that holds a quarter of the layers has room for four times as much of all.
    assert plan("9B", device=[cards[0]] * 24 + [cards[1]] * 8, available_bytes=None).kv_bytes == alone.kv_bytes
    # The processor takes part with a quarter of the host's memory, and KV may still move to the host.
    mixed = plan("9B", device=[cards[0]] * 16 + [CPU] * 16, available_bytes=None)
    assert (mixed.kv_bytes, mixed.device) == (16 * GIB, "cuda:0, cpu")
    assert mixed.host_kv_bytes == 8 * GIB
    with pytest.raises(ValueError, match="one for each of 32 layers; got 3"):
        plan("9B", device=cards + cards[:1])


def test_given_budgets_are_taken_and_without_reuse_nothing_is_kept():
    given = CacheSettings(state_bytes=0, vision_bytes=1, host_kv_bytes=2)
    taken = plan(settings=replace(given, kv_bytes=500 * MIB))
    assert taken.num_kv_tokens == 500 * MIB // (64 * 12 * KIB) * 64
    assert (taken.state_bytes, taken.vision_bytes, taken.host_kv_bytes) == (0, 1, 2)
    taken = plan(settings=replace(given, reuse=False))
    assert (taken.state_bytes, taken.vision_bytes, taken.host_kv_bytes) == (0, 0, 0)
    assert taken.kv_bytes == plan().kv_bytes


@given(
    st.sampled_from(["0.8B", "9B", "27B"]),
    st.integers(1, 100_000),
    st.integers(1, 300),
    st.integers(1, 16),
    st.integers(GIB, 400 * GIB),
)
@example("27B", 1, 1, 7, 1_231_683_584)  # room for the states and hardly more
def test_a_plan_holds_one_context_or_is_refused(size, context_length, block_size, num_slots, available_bytes):
    try:
        made = plan(
            size,
            context_length=context_length,
            block_size=block_size,
            num_slots=num_slots,
            available_bytes=available_bytes,
        )
    except ConfigError:
        needed = config_of(size).kv_bytes_per_token(torch.bfloat16) * (context_length + block_size)
        needed += (num_slots + 1) * config_of(size).state_bytes(torch.bfloat16)
        assert needed > available_bytes
    else:
        assert made.num_kv_tokens >= context_length
        assert made.num_kv_tokens % block_size == 0
        assert made.kv_bytes + made.slot_bytes <= available_bytes


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        pytest.param(
            {"size": "9B", "settings": CacheSettings(kv_bytes=100 * MIB)},
            ("32,768 tokens", "1,024.0 MiB", "32,768 x 32 KiB", "100.0 MiB", "3,200 tokens", "shorter context"),
            id="a budget",
        ),
        pytest.param(
            {"size": "27B", "context_length": 262_144, "available_bytes": 16 * GIB},
            ("memory of cpu", "16,384.0 MiB", "262,144 x 64 KiB", "734.1 MiB", "4 slots", "shorter context"),
            id="a machine",
        ),
        pytest.param(
            {"device": CUDA, "available_bytes": GIB, "settings": CacheSettings(kv_bytes=GIB)}, ("cuda:0",), id="a card"
        ),
    ],
)
def test_too_little_is_refused_with_the_arithmetic(options, parts):
    with pytest.raises(ConfigError) as caught:
        plan(**options)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_plan_describes_itself():
    assert plan("35B-A3B", settings=CacheSettings(kv_bytes=640 * MIB)).describe() == (
        "Cache on cpu: KV of 32,768 tokens x 20 KiB = 640.0 MiB (one context: 32,768 tokens), running states of 4 "
        "slots and one commit 307.0 MiB; kept at most: 1,024.0 MiB of states, 256.0 MiB of vision embeddings; "
        "with 0.0 MiB of weights and 0.0 MiB to compute with, 2,227.0 MiB in all."
    )
    given = CacheSettings(host_kv_bytes=3 * MIB)
    assert "3.0 MiB of KV in host memory" in plan(device=CUDA, settings=given).describe()


def test_the_systems_memory_is_read(monkeypatch):
    assert plan(available_bytes=None) == plan(available_bytes=host_memory_bytes())
    monkeypatch.setattr(planner, "cgroup_limits", lambda *paths: iter([3 * GIB]))
    assert host_memory_bytes() == 3 * GIB


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        pytest.param("0::/a/b\n", {"a/b/memory.max": "300", "a/memory.max": "max"}, [300], id="version 2"),
        pytest.param("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "200\n"}, [200], id="a group above"),
        pytest.param("0::/\n", {"memory.max": "100"}, [100], id="a container's own root"),
        pytest.param("0::/not/here\n", {"memory.max": "100"}, [100], id="a path of the host"),
        pytest.param("4:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "50"}, [50], id="version 1"),
        pytest.param(
            "3:cpu:/a\n", {"memory.max": "1", "cpu/a/memory.limit_in_bytes": "1"}, [], id="another controller"
        ),
        pytest.param("0::/\n", {"memory.max": "-1"}, [], id="not a number"),
        pytest.param("nonsense\n\n", {}, [], id="an unreadable list"),
        pytest.param(None, {"memory.max": "1"}, [], id="no list"),
    ],
)
def test_container_limits(tmp_path: Path, own, files, limits):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert list(cgroup_limits(tmp_path, tmp_path / "own")) == limits


def test_a_folder_may_be_a_string(tmp_path: Path) -> None:
    assert CacheSettings.of(str(tmp_path)) == CacheSettings.of(tmp_path) == CacheSettings(directory=tmp_path)
    assert CacheSettings.of("~/x").directory == Path.home() / "x"
    assert CacheSettings.of(None) == CacheSettings()
    for wrong in (3, True, ""):
        with pytest.raises(ConfigError, match="must be"):
            CacheSettings.of(wrong)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ConfigError, match="directory must be a folder"):
            CacheSettings(directory=wrong)  # pyright: ignore[reportArgumentType]


def test_a_smaller_type_of_keys_and_values_holds_more_tokens() -> None:
    budget, bytes_of = 64 * MIB, {"auto": 12288, "f16": 12288, "k=int8,v=int4": 4992, "fp8": 6528, "int4": 3456}
    bytes_of |= {"int4r": 3456, "tq4": 3120, "tq3": 2352}
    for kv_dtype, token_bytes in bytes_of.items():
        found = plan(context_length=2048, settings=CacheSettings(kv_bytes=budget, kv_dtype=kv_dtype))
        assert (found.kv_token_bytes, found.num_kv_tokens) == (token_bytes, budget // (64 * token_bytes) * 64)


def test_a_context_of_which_a_share_is_kept_takes_less() -> None:
    """What a prompt's finished segments keep, and 8,192 rows for the newest tokens."""
    whole, half, media = (
        plan(context_length=65_536, available_bytes=2 * GIB, settings=CacheSettings(kv_keep=kv_keep))
        for kv_keep in ("1", "0.5", "text=1,media=0.5")
    )
    rows = (65_536 - 8_192) // 2 + 2 * (65_536 - 8_192) // 128 + 8_192
    assert (whole.context_rows, half.context_rows, media.context_rows) == (65_536, rows, 65_536)
    assert whole.kv_bytes == 65_536 * 12 * KIB
    assert half.kv_bytes == -(-rows // 64) * 64 * 12 * KIB
    assert f"one context: 65,536 tokens with KV of {rows:,}" in half.describe()
    budget = CacheSettings(kv_keep="0.5", kv_bytes=half.kv_bytes)
    assert plan(context_length=65_536, settings=budget).num_kv_tokens == half.num_kv_tokens
    with pytest.raises(ConfigError, match=rf"65,536 tokens needs .* \({rows:,} x 12 KiB"):
        plan(context_length=65_536, settings=replace(budget, kv_bytes=half.kv_bytes - 1))


@pytest.mark.parametrize("text", ["int3", "", "k=int8", "k=int8,v=int4,k=int8", "int8,int4", "v=int8,v=int8", None])
def test_a_type_of_keys_and_values_that_there_is_not_is_told(text: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"fp8_e5m2, int8, int4, int4r, tq4, tq3, or separately, as in k=int8,v=int4; got"
    ):
        CacheSettings(kv_dtype=text)


def test_where_a_type_of_keys_and_values_cannot_be_is_told() -> None:
    def check(kv_dtype: str, devices: list[torch.device], head_dim: int = 256) -> None:
        text = replace(config_of("0.8B").text, head_dim=head_dim)
        check_kv_formats(kv_formats_of(kv_dtype, torch.bfloat16), text, devices)

    check("bf16", [CUDA], head_dim=48)
    check("k=fp8,v=int8", [CPU, CUDA])
    check("tq3", [CPU])
    with pytest.raises(ConfigError, match=r"tq3 works only on a CPU. On a GPU .* as .*bf16, f16, fp8, .*int4\. "):
        check("k=bf16,v=tq3", [CPU, CUDA])
    with pytest.raises(ConfigError, match="groups of 32, and this model's heads have 48 dimensions"):
        check("int4", [CPU], head_dim=48)
    check("int4", [CPU], head_dim=96)
    with pytest.raises(ConfigError, match=r"tq3 rotates heads, .* power of two from 32 on, and this model's have 96"):
        check("k=int4,v=tq3", [CPU], head_dim=96)


def test_keys_and_values_in_a_file_take_no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planner, "file_room", lambda folder: 12 * GIB)
    sizes = {"weights_bytes": GIB, "work_bytes": GIB // 4, "runtime_bytes": GIB // 4}
    how: dict[str, Any] = {"num_slots": 1, "context_length": 1 << 20, "limit_bytes": 2 * GIB, **sizes}
    with pytest.raises(ConfigError, match=r"KV takes 12,288\.0 MiB"):
        plan(**how)
    mapped = plan(**how, settings=CacheSettings(kv_directory=tmp_path))
    assert (mapped.num_kv_tokens, mapped.kv_bytes, mapped.kv_memory_bytes) == (1 << 20, 12 * GIB, 0)
    assert mapped.kv_directory == str(tmp_path)
    # What is kept gets the rest of the memory, as without a file.
    assert 2 * GIB - 2 < mapped.total_bytes <= 2 * GIB
    assert mapped.total_bytes == mapped.slot_bytes + mapped.state_bytes + mapped.vision_bytes + GIB * 3 // 2
    assert f"12,288.0 MiB in a file in {tmp_path} (one context" in mapped.describe()
    for changes, told in (
        ({"context_length": (1 << 20) + 1}, r"nor on the disk: .*needs 12,288\.8 MiB .*may take 12,288\.0 MiB"),
        ({"num_slots": 2}, "one reply at a time; 2 were asked for: --slots 1"),
        ({"device": CUDA, "available_bytes": 64 * GIB}, "only on a CPU; the device is cuda:0"),
        ({"weights_bytes": 3 * GIB}, "doesn't fit into the memory"),
    ):
        with pytest.raises(ConfigError, match=told):
            plan(**{**how, **changes}, settings=CacheSettings(kv_directory=tmp_path))
    with pytest.raises(ConfigError, match="Only a CPU can keep keys and values in a file"):
        plan(device=CUDA, context_length=1 << 20, available_bytes=8 * GIB)
    with pytest.raises(ConfigError, match="kv_directory must be a folder"):
        CacheSettings(kv_directory=7)  # pyright: ignore[reportArgumentType]
