"""Models that are split over devices: what is asked for, where parts go, and that each works where it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.make_random import make_config
from qwen35mm.cache import CachePools
from qwen35mm.config import ModelConfig
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.step_graph import StepGraph
from qwen35mm.errors import ConfigError
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.model.devices import DeviceMap, DeviceRequest, keep_sums_exact, place, shortage
from qwen35mm_kernels import cpu
from tests.model.layouts import our_prefill_of, our_step
from tests.tiny import DEEP, SHALLOW, TinyCheckpoints

GIB = 1 << 30
CPU, META = torch.device("cpu"), torch.device("meta")
CARDS = tuple(torch.device("cuda", index) for index in range(2))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """GiB that are free on each of two cards."""
    free_gib = [24.0, 24.0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (int(free_gib[torch.device(device).index] * GIB), 24 * GIB)
    )
    return free_gib


@pytest.fixture
def reductions() -> Iterator[Callable[[], tuple[bool, bool | None]]]:
    """Whether parts of a bfloat16 sum may be rounded, and whether it may be split; restored after the test."""
    matmul, name = torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"

    def settings() -> tuple[bool, bool | None]:
        return getattr(matmul, name), getattr(matmul, f"{name}_split_k", None)

    rounds, splits = settings()
    yield settings
    setattr(matmul, name, rounds if splits is None else (rounds, splits))


def test_parts_of_a_sum_are_not_rounded_on_cards(reductions: Callable[[], tuple[bool, bool | None]]) -> None:
    rounds, splits = reductions()
    assert rounds, "torch's default"
    keep_sums_exact([CPU])
    assert reductions() == (rounds, splits), "a processor has no such sums"
    keep_sums_exact([CPU, CARDS[0]])
    assert reductions() == (False, splits)


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k"),
    reason="only torch 2.10 and later can forbid splits",
)
def test_a_forbidden_split_stays_forbidden(reductions: Callable[[], tuple[bool, bool | None]]) -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    keep_sums_exact(CARDS)
    assert reductions() == (False, False)


@pytest.fixture(scope="module")
def skeletons() -> dict[str, Qwen35Model]:
    """By size: 9B takes 17.5 GiB in 32 layers, 0.8B 1.6 GiB in 24."""
    configs = {size: ModelConfig.from_dict(make_config(size, "bfloat16")) for size in ("0.8B", "9B")}
    return {size: Qwen35Model(config, dtype=torch.bfloat16, device=META) for size, config in configs.items()}


@pytest.mark.parametrize(
    ("text", "devices", "spread"),
    [
        ("auto", CARDS, False),
        ("cpu", (CPU,), True),
        ("cuda", CARDS[:1], True),
        ("cuda:1", CARDS[1:], True),
        ("cuda:0, cuda:1", CARDS, True),
        ("cpu,cuda:0", (CARDS[0], CPU), True),
    ],
)
def test_devices_that_can_be_asked_for(
    free: list[float], text: str, devices: tuple[torch.device, ...], spread: bool
) -> None:
    assert DeviceRequest.parse(text) == DeviceRequest(devices, spread)


def test_auto_without_a_card_is_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert DeviceRequest.parse("auto").devices == (CPU,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda:2", "'cuda:2' was asked for and this PyTorch sees 2 CUDA devices"),
        ("cuda:0,cuda", "device names cuda:0 twice: 'cuda:0,cuda'"),
        ("gpu", "device must be auto, cpu, cuda, cuda:N or several of these; got 'gpu'"),
        ("cuda:0,", "got ''"),
        ("mps", "'mps' isn't supported yet"),
        ("auto,cpu", "got 'auto'"),
    ],
)
def test_other_devices_are_refused_in_words(free: list[float], text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceRequest.parse(text)


def place_of(name: str, model: Qwen35Model, request: DeviceRequest) -> DeviceMap:
    return place(name, sum(x.nbytes for x in model.parameters()), len(model.layers), lambda: model, request)


def weights_on(model: Qwen35Model, places: DeviceMap, device: torch.device) -> float:
    """GiB of a model's weights that a map puts on a device."""
    modules: list[tuple[Any, torch.device]] = [
        (model.embedding, places.embedding),
        (model.norm, places.norm),
        (model.visual, places.visual),
        *zip(model.layers, places.layers, strict=True),
    ]
    if model.lm_head is not None:
        modules.append((model.lm_head, places.lm_head))
    return sum(x.nbytes for module, where in modules if where == device for x in module.parameters()) / GIB


@pytest.mark.parametrize("free_gib", [(24, 24), (12, 12), (8, 20), (20, 8)])
@pytest.mark.parametrize("devices", ["cuda:0,cuda:1", "cuda:0,cpu"])
def test_a_split_leaves_room_for_caches_and_its_ends_on_the_first_card(
    free: list[float], skeletons: dict[str, Qwen35Model], free_gib: tuple[float, float], devices: str
) -> None:
    free[:] = free_gib
    model, request = skeletons["9B"], DeviceRequest.parse(devices)
    places = place_of("9B", model, request)
    taken = [weights_on(model, places, device) for device in request.devices]
    assert sum(taken) == pytest.approx(17.5, abs=0.1)
    for device, gib, room in zip(request.devices, taken, free_gib, strict=True):
        assert device == CPU or gib <= room * 7 / 8 - 1
    assert places.embedding == places.lm_head == places.visual == CARDS[0]
    assert places.norm in (CARDS[0], places.layers[-1])
    # In order, each device once.
    assert list(places.layers) == sorted(places.layers, key=request.devices.index)
    if devices == "cuda:0,cuda:1":
        assert min(taken) > 0.5, "both cards were asked for"


def test_no_more_cards_are_taken_than_needed_unless_asked_for(
    free: list[float], skeletons: dict[str, Qwen35Model]
) -> None:
    auto = DeviceRequest.parse("auto")
    assert set(place_of("9B", skeletons["9B"], auto).layers) == {CARDS[0]}
    free[0] = 2
    assert set(place_of("9B", skeletons["9B"], auto).layers) == {CARDS[1]}
    free[:] = [14, 14]
    assert set(place_of("9B", skeletons["9B"], auto).layers) == set(CARDS)
    free[:] = [24, 24]
    assert set(place_of("9B", skeletons["9B"], DeviceRequest.parse("cuda:0,cuda:1")).layers) == set(CARDS)
    # What fits on the card needs no processor, though it was offered.
    assert set(place_of("0.8B", skeletons["0.8B"], DeviceRequest.parse("cuda:0,cpu")).layers) == {CARDS[0]}


@pytest.mark.parametrize("devices", ["auto", "cuda:0,cuda:1"])
def test_the_processor_computes_nothing_unasked(
    free: list[float], skeletons: dict[str, Qwen35Model], devices: str
) -> None:
    free[:] = [8, 8]
    with pytest.raises(ConfigError) as caught:
        place_of("Qwen3.5-9B", skeletons["9B"], DeviceRequest.parse(devices))
    assert "Qwen3.5-9B takes 17.5 GiB of weights, and cuda:0 has 8.0 GiB free of 24.0 GiB, cuda:1" in str(caught.value)
    assert "With --device cuda:0,cuda:1,cpu the processor computes the layers that don't fit" in str(caught.value)
    places = place_of("9B", skeletons["9B"], DeviceRequest.parse("cuda:0,cuda:1,cpu"))
    assert set(places.layers) == {*CARDS, CPU}


@pytest.mark.parametrize(
    ("free_gib", "advice"),
    [
        ((8, 4), "choose a smaller model"),
        ((4, 20), r"There is room on cuda:1 \(--device cuda:1\)\."),
        ((15, 15), r"Several cards together may have room \(--device cuda:0,cuda:1\)\."),
    ],
)
def test_a_model_that_does_not_fit_on_a_card_is_refused_with_what_would_help(
    free: list[float], skeletons: dict[str, Qwen35Model], free_gib: tuple[float, float], advice: str
) -> None:
    free[:] = free_gib
    numbers = f"9B takes 17.5 GiB of weights, and cuda:0 has {free_gib[0]}.0 GiB free of 24.0 GiB; a card needs"
    with pytest.raises(ConfigError, match=f"{numbers}.*{advice}"):
        place_of("9B", skeletons["9B"], DeviceRequest.parse("cuda:0"))


def test_a_shortage_says_what_was_asked_for_and_what_is_free(free: list[float]) -> None:
    free[0] = 20
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of ...")
    assert "2.50 GiB were asked for, 20.0 GiB are free of 24.0 GiB" in str(shortage(error, CARDS[0]))
    assert "more was asked for than there was" in str(shortage(torch.OutOfMemoryError("?"), CARDS[0]))
    assert str(shortage(error, CPU)).startswith("Memory ran out while this was computed.")


def test_a_split_is_told_in_a_line(free: list[float]) -> None:
    places = DeviceMap(CARDS[0], (CARDS[0], CARDS[0], CARDS[1]), CARDS[1], CARDS[0], CARDS[0])
    assert places.describe() == "layers 0-1 on cuda:0, 2-2 on cuda:1; embeddings on cuda:0, vision tower on cuda:0"


class OnOneDevice(TorchDispatchMode):
    """Fails where an operation other than a copy takes tensors of two devices, as a GPU would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = {x.device for x in tensors if x.dim() or x.device.type != "cpu"}
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        assert copies or len(devices) <= 1, f"{func} takes tensors of {devices}"
        return func(*args, **kwargs)


@pytest.fixture(params=[SHALLOW, DEEP], ids=lambda spec: spec.name)
def split(
    request: pytest.FixtureRequest, tiny: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Qwen35Model, CachePools]]:
    """A model whose last layers and norm lie on the meta device: there shapes and devices are real."""
    config = ModelConfig.from_pretrained(tiny.folder(request.param))
    half = config.text.num_layers // 2
    places = DeviceMap(CPU, (CPU,) * half + (META,) * (config.text.num_layers - half), META, META, CPU)
    model = Qwen35Model(config, dtype=torch.float32, device=places)
    for parameter in model.parameters():
        parameter.data.zero_()
    pools = CachePools(
        config, num_slots=2, num_tokens=128, dtype=torch.float32, device=model.layer_devices, block_size=16
    )

    def devices_of(*tensors: torch.Tensor | float) -> set[torch.device]:
        """Besides numbers of a piece, which stay on the host where operations read them there."""
        found = [x for x in tensors if isinstance(x, torch.Tensor)]
        return {x.device for x in found if not (x.device == CPU and x.shape == (1,) and x.dtype == torch.int64)}

    def attend(q: torch.Tensor, *tensors: torch.Tensor | int, **options: Any) -> torch.Tensor:
        assert devices_of(*tensors) == {q.device}
        return torch.empty_like(q)

    def write(qkv: torch.Tensor, *tensors: torch.Tensor | float, num_heads: int, formats: Any) -> torch.Tensor:
        assert {x.device for x in tensors if isinstance(x, torch.Tensor)} == {qkv.device}
        return qkv.new_empty(len(qkv), num_heads, config.text.head_dim)

    decode_step = cpu.gdn_decode_step

    def step(mixed: torch.Tensor, *rest: torch.Tensor | float, num_k_heads: int) -> torch.Tensor:
        if mixed.device == CPU:
            return decode_step(mixed, *rest, num_k_heads=num_k_heads)  # pyright: ignore[reportArgumentType]
        assert {x.device for x in rest if isinstance(x, torch.Tensor)} == {META}
        return mixed.new_empty(len(mixed), config.text.value_dim)

    def piece(operation: Any, result: int) -> Any:
        """An operation of a piece's linear attention; its result is shaped as an argument."""

        def run(*tensors: torch.Tensor) -> torch.Tensor:
            assert devices_of(*tensors) == {tensors[0].device}
            return operation(*tensors) if tensors[0].device == CPU else torch.empty_like(tensors[result])

        return run

    # The torch versions read places, lengths and slots, which nothing on the meta device has.
    monkeypatch.setattr(cpu, "causal_conv1d", piece(cpu.causal_conv1d, 0))
    monkeypatch.setattr(cpu, "gated_delta_prefill", piece(cpu.gated_delta_prefill, 2))
    monkeypatch.setattr(cpu, "gdn_decode_step", step)
    monkeypatch.setattr(cpu, "paged_attention_decode", attend)
    monkeypatch.setattr(cpu, "paged_attention_prefill", attend)
    monkeypatch.setattr(cpu, "qk_norm_rope_write", write)
    with OnOneDevice():
        yield model, pools


def test_what_a_split_model_has_is_where_its_layers_are(split: tuple[Qwen35Model, CachePools]) -> None:
    model, pools = split
    assert (model.device, model.devices) == (CPU, (CPU, META))
    assert model.head_device == (CPU if model.lm_head is None else META)
    for layer_idx, device in enumerate(model.layer_devices):
        assert {x.device for x in model.layers[layer_idx].parameters()} == {device}
        assert {x.device for x in pools.layers[layer_idx]} == {device}


def test_a_split_model_computes_each_layer_where_it_lies(split: tuple[Qwen35Model, CachePools]) -> None:
    model, pools = split
    cache = pools.new_sequence()
    for start, stop in ((0, 20), (20, 25)):
        positions = torch.arange(start, stop).expand(3, -1)
        hidden = our_prefill_of(model, model.embed_tokens(torch.arange(stop - start)), positions, cache)
        assert (hidden.device, len(hidden)) == (META, stop - start)
    hidden = our_step(model, [1, 0], [cache, None])
    assert (hidden.device, hidden.shape) == (META, (2, model.config.text.hidden_size))


def test_a_step_of_a_split_model_is_a_part_for_each_device(
    split: tuple[Qwen35Model, CachePools], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pools = split
    sampler = Sampler(2, model.config.text.vocab_size, [], model.head_device)
    # Nothing on the meta device has a likeliest token.
    monkeypatch.setattr(StepGraph, "_choose", lambda self, hidden: (hidden,))
    graph = StepGraph(model, pools, sampler, 2, 4)
    assert [part.device for part in graph._parts] == ([CPU, META] if model.head_device == META else [CPU, META, CPU])
    left: tuple[torch.Tensor, ...] = (torch.zeros(3, dtype=torch.int64),)
    for part, count in zip(graph._parts[:2], (4, 1), strict=True):
        part.enter(left)
        part.compute()
        left = part.out
        assert [x.device for x in left] == [part.device] * count
