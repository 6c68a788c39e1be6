"""Counts what a card is asked to run in a piece of a prompt, a decode step and the vision tower. Needs no card.

    python -m benchmarks.launch_counts --sizes 0.8B,9B,27B,35B-A3B

The engine runs on meta tensors, which have shapes and no numbers. Counted are kernels of ours, products (cuBLAS may
take two kernels for one), and torch's other operations. Views and allocations launch nothing. On one card a piece is
launched as a graph and what is around it; a decode step is a graph for each run of layers on one card.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.frame import parse, parser, report
from benchmarks.make_random import SIZES, make_config
from qwen35mm_preprocess import GridTHW, Patches

if TYPE_CHECKING:
    from qwen35mm.engine.step_graph import StepGraph
    from qwen35mm.model.devices import DeviceMap

META = torch.device("meta")
CONTEXT_LENGTH = 32_768
_PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm")
_NO_LAUNCHES = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach_",
    "_unsafe_view",
    "lift_fresh",
)


class BareEngine:
    """A model without numbers, its pools and its sampler: what an engine runs, without an engine.

    On meta tensors it is made inside `as_on_a_card`.

    Args:
        data: a config.json, as `benchmarks.make_random.make_config` makes it.
        device: of the whole model, or a device for each part.
        num_rows: most rows of a decode step.
    """

    def __init__(
        self,
        data: dict[str, Any],
        *,
        device: torch.device | DeviceMap = META,
        kv_dtype: str = "auto",
        integers: str | None = None,
        num_rows: int = 8,
        num_tokens: int = CONTEXT_LENGTH,
    ) -> None:
        from qwen35mm.cache import CachePools
        from qwen35mm.cache.kv_types import kv_formats_of
        from qwen35mm.config import ModelConfig
        from qwen35mm.engine.pieces import Pieces
        from qwen35mm.engine.sampler import Sampler
        from qwen35mm.engine.settings import GPU_CHUNK_TOKENS
        from qwen35mm.model import Qwen35Model

        self.config, self.num_tokens = ModelConfig.from_dict(data), num_tokens
        dtype = getattr(torch, data["text_config"]["dtype"])
        self.model = Qwen35Model(self.config, dtype=dtype, device=device, integers=integers)
        self.device = self.model.device
        num_slots = num_rows + 1
        self.pools = CachePools(
            self.config,
            num_slots=num_slots,
            num_tokens=num_tokens,
            dtype=self.model.dtype,
            device=self.model.layer_devices,
            kv_formats=kv_formats_of(kv_dtype, self.model.dtype),
        )
        self.sampler = Sampler(num_slots, self.config.text.vocab_size, [], self.model.head_device)
        self.pieces = Pieces(self.model, self.pools, num_tokens, GPU_CHUNK_TOKENS)

    @contextlib.contextmanager
    def piece(self, length: int, history: int = 0, *, captured: bool = False) -> Iterator[Callable[[], None]]:
        """Computes a piece of a prompt behind `history` tokens, and chooses the first token; any number of times.

        Args:
            captured: as a graph where there can be one, made before anything is computed.
        """

        with torch.inference_mode():
            cache = self.pools.new_sequence()
            cache.prepare(history)
            cache.advance(history)
            cache.prepare(length)
            positions = torch.zeros(3, length, dtype=torch.int64)

        @torch.inference_mode()
        def run() -> None:
            hidden = self.pieces.run(cache, positions[0], positions, by_graph=captured)
            self.first_token(hidden[-1:])

        if captured:
            while self.pieces.can_prepare:
                self.pieces.prepare()
        yield run
        cache.free()

    @torch.inference_mode()
    def first_token(self, hidden: torch.Tensor) -> None:
        """Chooses a token by the last state [1, hidden]."""
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.sampler.sample(self.model.logits(hidden), first, first)

    @torch.inference_mode()
    def graph_agrees(self, length: int, history: int) -> bool:
        """Whether a piece gives the same hidden states and states launched one by one and as a graph."""
        found = []
        for by_graph in (False, True):
            cache = self.pools.new_sequence()
            cache.prepare(history)
            cache.advance(history)
            cache.prepare(length)
            positions = torch.arange(length).expand(3, -1) % self.config.text.vocab_size
            hidden = self.pieces.run(cache, positions[0], positions, by_graph=by_graph)
            # Random integers may stand for no numbers.
            found.append([x.nan_to_num() for x in (hidden, *self.pools.states.save(cache.slot).values())])
            cache.free()
        return all(map(torch.equal, *found))

    def step(self, num_rows: int) -> StepGraph:
        """A decode step of that many replies."""
        from qwen35mm.engine.step_graph import StepGraph

        max_blocks = self.pools.kv.blocks_for(self.num_tokens)
        return StepGraph(self.model, self.pools, self.sampler, num_rows, max_blocks)

    def embed(self, grid: tuple[int, int, int]) -> None:
        """The tower's run over a picture or a unit of a video, of temporal patches, height and width."""
        assert self.config.vision is not None
        patches = grid[0] * grid[1] * grid[2]
        assert self.model.tower is not None
        self.model.tower(torch.zeros(patches, self.config.vision.patch_dim), grid)


def halves(device: torch.device, num_layers: int) -> DeviceMap:
    """A model split over two devices that are one: the second half of its layers knows it by another name."""
    from qwen35mm.model.devices import DeviceMap

    second = torch.device(device.type, 0) if device.index is None else torch.device(device.type)
    half = num_layers // 2
    return DeviceMap(device, (device,) * half + (second,) * (num_layers - half), second, device, device)


def shallow(size: str, num_layers: int, num_blocks: int, dtype: str = "bfloat16") -> dict[str, Any]:
    """A size's config with its first layers, and so many blocks in the tower."""
    data = make_config(size, dtype)
    text = data["text_config"]
    text["num_hidden_layers"], text["layer_types"] = num_layers, text["layer_types"][:num_layers]
    data["vision_config"]["depth"] = num_blocks
    return data


def random_patches(grid: tuple[int, int, int]) -> Patches:
    """A picture's, of some pixels."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (math.prod(grid), 3, 1, 16 * 16), dtype=np.uint8)
    return Patches(pixels, random.standard_normal((3, 256), np.float32), temporal_patch_size=2)


@contextlib.contextmanager
def as_on_a_card() -> Iterator[None]:
    """Models made inside run on meta tensors as on a card with Triton. A graph is one operation, on nothing."""
    from qwen35mm.engine import pieces
    from qwen35mm.model import layers, mlp
    from qwen35mm_kernels import backend

    backend._backend.cache_clear()
    with contextlib.ExitStack() as stack:
        for module in (backend, layers, mlp):
            stack.enter_context(mock.patch.object(module, "why_not_triton", return_value=None))
        replay = torch.empty(0, device=META).zero_
        for name, value in (("pads_pieces", True), ("can_capture", True), ("capture", replay)):
            stack.enter_context(mock.patch.object(pieces, name, return_value=value))
        stack.callback(backend._backend.cache_clear)
        yield


@dataclass
class Counts(TorchDispatchMode):
    """What was launched while it was entered."""

    ours: int = 0
    products: int = 0
    torch: int = 0
    graphs: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def all(self) -> int:
        return self.ours + self.products + self.torch + self.graphs

    def capture(self, device: torch.device, compute: Callable[[], None], memory: Any) -> Callable[[], None]:
        """In the place of `qwen35mm.engine.capture`."""
        compute()
        return self._count_graph

    def _count_graph(self) -> None:
        self.graphs += 1

    def count_kernel(self, *args: Any, **kwargs: Any) -> None:
        self.ours += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "copy_" and args[1].device.type == "meta":
            # What has no numbers isn't copied to the host.
            self.torch += 1
            return args[0]
        found = func(*args, **(kwargs or {}))
        # `to` counts as a view, and copies where the type is another.
        is_view = found.dtype == args[0].dtype if name == "to" else func.is_view
        if name in _PRODUCTS:
            self.products += 1
        elif not is_view and name not in _NO_LAUNCHES:
            self.torch += 1
        return found


@torch.inference_mode()
def count(run: Callable[[], object]) -> Counts:
    """What a run launches."""
    from qwen35mm_kernels.gpu.launch import trial

    counts = Counts()

    def attend(q: torch.Tensor, *others: torch.Tensor, **options: Any) -> torch.Tensor:
        # On meta tensors torch takes it apart into what a card doesn't run.
        counts.torch += 1
        with _disable_current_modes():
            return torch.empty_like(q)

    with trial({}, counts.count_kernel), mock.patch.object(F, "scaled_dot_product_attention", attend), counts:
        run()
    return counts


@torch.inference_mode()
def count_replay(make: Callable[[], Callable[[], object]]) -> Counts:
    """What the host launches for work that is captured where an engine captures: graphs, and copies.

    Args:
        make: captures the work, and returns what replays it.
    """
    from qwen35mm.engine import parts, tower
    from qwen35mm_kernels.gpu.launch import trial

    counts = Counts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(trial({}, lambda *arguments, **options: None))
        for module in (parts, tower):
            stack.enter_context(mock.patch.object(module, "capture", counts.capture))
            stack.enter_context(mock.patch.object(module, "runs_triton", return_value=True))
        replay = make()
        counts.graphs = 0
        with counts:
            replay()
    return counts


def replayed_step(engine: BareEngine, num_rows: int) -> Callable[[], None]:
    """A step that is captured."""
    return functools.partial(engine.step(num_rows).run, 0)


def replayed_tower(engine: BareEngine, grid: tuple[int, int, int]) -> Callable[[], torch.Tensor]:
    """The tower's run over a picture whose grid is captured."""
    from qwen35mm.engine.tower import RUNS_BEFORE, Tower

    tower, patches = Tower(engine.model), random_patches(grid)
    *_, graph = [tower.graph_of(patches, GridTHW(*grid)) for _ in range(RUNS_BEFORE)]
    assert graph is not None
    return functools.partial(graph.run, patches)


def counted(engine: BareEngine) -> Iterator[dict[str, Any]]:
    """A row for each kind of work."""
    with (
        engine.piece(512) as piece,
        engine.piece(64, 16_384) as turn,
        engine.piece(512, captured=True) as captured,
    ):
        runs = {
            "piece of 512": piece,
            "piece of 64 behind 16384": turn,
            "piece of 512, captured": captured,
            "step of 1": engine.step(1).compute,
            "step of 8": engine.step(8).compute,
            "tower, 1024 x 1024": functools.partial(engine.embed, (1, 64, 64)),
        }
        for name, run in runs.items():
            found = count(run)
            yield as_row(name, found)
    yield as_row("step of 1 as a graph", count_replay(lambda: replayed_step(engine, 1)))
    yield as_row("tower, 1024 x 1024, as a graph", count_replay(lambda: replayed_tower(engine, (1, 64, 64))))


def as_row(name: str, counts: Counts) -> dict[str, Any]:
    row = {"run": name, "launches": counts.all, "ours": counts.ours, "products": counts.products}
    return row | {"torch": counts.torch, "graphs": counts.graphs}


def main() -> None:
    options = parser(__doc__, model=False)
    options.add_argument("--sizes", type=lambda text: text.split(","), default=["0.8B", "9B"])
    options.add_argument("--kv-dtype", default="auto")
    arguments = parse(options)
    if set(arguments.sizes) - set(SIZES):
        options.error(f"--sizes takes {', '.join(SIZES)}")
    rows = []
    with as_on_a_card():
        for size in arguments.sizes:
            data = make_config(size, "bfloat16")
            engine = BareEngine(data, kv_dtype=arguments.kv_dtype)
            found = [*counted(engine)]
            split = halves(META, len(engine.model.layers))
            engine = BareEngine(data, device=split, kv_dtype=arguments.kv_dtype)
            on_two_cards = count_replay(functools.partial(replayed_step, engine, 1))
            found.append(as_row("step of 1 on two cards", on_two_cards))
            rows += [{"model": size, **row} for row in found]
    report("launch_counts", arguments, {"Launches": rows})


if __name__ == "__main__":
    main()
