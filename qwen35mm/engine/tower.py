"""The vision tower on a card: units of a grid that comes again and again are one graph.

Launched one by one, a picture is hundreds of launches, and a card waits for the host: captions of pictures from one
camera, and all units of a video, have the same grid.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qwen35mm.engine.batches import for_upload, upload
from qwen35mm.engine.capture import capture
from qwen35mm.engine.vision import GPU_PATCH_LAYERS, VisionUnit, encode, look_up, patches_of
from qwen35mm.model import Qwen35Model
from qwen35mm.model.adapters import Groups
from qwen35mm_kernels.backend import runs_triton
from qwen35mm_preprocess import GridTHW, Patches, PreparedMedia

logger = logging.getLogger(__name__)

# A grid is captured when it comes this often: a capture costs about as much as the launches until then.
RUNS_BEFORE = 4
# Graphs at one time, and their patches together. With more patches than half of these, the card is busy by itself.
MOST_GRAPHS = 4
GRAPH_PATCHES = 8_192
# Units since a graph's last use until another grid may take its place.
_UNUSED_FOR = 64
# Grids whose units are counted.
_MOST_COUNTED = 1_024


@dataclass(frozen=True)
class _Kind:
    """What a graph is made for.

    Attributes:
        num_frames: differing frames of a temporal patch.
        adapters: numbers of the unit's adapters.
    """

    grid_thw: GridTHW
    num_frames: int
    temporal_patch_size: int
    adapters: tuple[int, ...]


class Tower:
    """Encodes units with a model's vision tower.

    A graph runs the kernels that would be launched, so features have the same bits. It keeps its memory until it makes
    room for another grid's.
    """

    def __init__(self, model: Qwen35Model) -> None:
        self._model = model
        self._captures = model.visual is not None and runs_triton(model.tower.device)
        self._num_runs: Counter[_Kind] = Counter()
        # The least recently used first.
        self._graphs: dict[_Kind, TowerGraph] = {}
        self._num_units = 0

    def encode(
        self, unit: VisionUnit, medium: PreparedMedia, adapters: Groups = ()
    ) -> Iterator[tuple[int, torch.Tensor | None]]:
        """Runs a unit through the tower; a graph runs all layers in one step. Yields what `vision.encode` does."""
        graph = self.graph_of(patches_of(unit, medium), unit.grid_thw, adapters) if self._captures else None
        if graph is None:
            return encode(self._model, unit, medium, adapters)
        features = graph.run(patches_of(unit, medium))
        return iter([(self._model.tower.config.depth, features)])

    def graph_of(self, patches: Patches, grid_thw: GridTHW, adapters: Groups = ()) -> TowerGraph | None:
        """The graph for a unit, if its kind has one by now; counts the unit."""
        num_patches = len(patches)
        if num_patches > min(GRAPH_PATCHES // 2, GPU_PATCH_LAYERS // self._model.tower.config.depth):
            return None
        self._num_units += 1
        numbers = tuple(number for number, _ in adapters)
        kind = _Kind(grid_thw, patches.pixels.shape[2], patches.temporal_patch_size, numbers)
        graph = self._graphs.pop(kind, None) or self._new_graph(kind, adapters, patches)
        if graph is not None:
            self._graphs[kind], graph.last_use = graph, self._num_units
        return graph

    def _new_graph(self, kind: _Kind, adapters: Groups, patches: Patches) -> TowerGraph | None:
        if len(self._num_runs) >= _MOST_COUNTED:
            self._num_runs.clear()
        self._num_runs[kind] += 1
        if self._num_runs[kind] < RUNS_BEFORE or not self._make_room(len(patches)):
            return None
        del self._num_runs[kind]
        try:
            return TowerGraph(self._model, kind, adapters, patches)
        except Exception:
            logger.warning("the vision tower couldn't be captured; it is launched one by one", exc_info=True)
            self._captures = False
            self._graphs.clear()
            return None

    def _make_room(self, num_patches: int) -> bool:
        """Drops graphs that haven't been used for long; whether so many patches then have room."""
        for kind, graph in list(self._graphs.items()):
            total = sum(each.grid_thw.num_patches for each in self._graphs)
            if total + num_patches <= GRAPH_PATCHES and len(self._graphs) < MOST_GRAPHS:
                break
            if self._num_units - graph.last_use <= _UNUSED_FOR:
                return False
            del self._graphs[kind]
        return True


class TowerGraph:
    """The tower's run over units of one kind, with memory of its own, which goes with it.

    Args:
        patches: of some unit.
    """

    def __init__(self, model: Qwen35Model, kind: _Kind, adapters: Groups, patches: Patches) -> None:
        self._model, self._kind, self._adapters = model, kind, adapters
        self.last_use, device = 0, model.tower.device
        self._pixels, self._table = upload(patches.pixels, device), upload(patches.table, device)
        self._places = model.tower.places(kind.grid_thw)
        self._replay = capture(device, self._compute, None)

    @torch.inference_mode()
    def run(self, patches: Patches) -> torch.Tensor:
        """A unit's features [tokens, hidden]."""
        for own, values in ((self._pixels, patches.pixels), (self._table, patches.table)):
            own.copy_(for_upload(values, own.device), non_blocking=True)
        self._replay()
        return self._features.clone()

    @torch.inference_mode()
    def _compute(self) -> None:
        tower, grid = self._model.tower, self._kind.grid_thw
        values = look_up(self._pixels, self._table, self._kind.temporal_patch_size)
        with self._model.routes.using(self._adapters):
            x, rope = tower.embed(values, grid, self._places)
            for block in tower.blocks:
                x = block(x, rope, grid.t)
            self._features = tower.merger(x)
