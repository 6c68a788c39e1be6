"""Writes this card's table of kernel configurations, kernels/qwen35mm_kernels/gpu/configs/<card>.json.

    python -m benchmarks.tune_kernels                    every kernel at the shapes of Qwen3.5
    python -m benchmarks.tune_kernels --only gdn --models 9B,27B
    python -m benchmarks.tune_kernels --dry-run          counts what would be tried; needs no card

Each kernel is tuned inside the public operations that launch it, at several sizes, with cold caches and CUDA graphs.
`tuning` lists the candidates. A candidate replaces the default if it is at least 2 % faster in the geometric mean over
the sizes and at most 5 % slower at each: one entry is for all prompt lengths and batch sizes. The fastest of many
candidates is partly luck, so it must win a second measurement, too. A wrong result is never chosen.

The table is written after every shape, and keeps entries that this run doesn't tune. So a run may be stopped at any
time and repeated. Commit the table: it decides how kernels round, and is part of the cache's fingerprint.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

from benchmarks.frame import Sample, parse, parser, report
from benchmarks.kernel_cases import SHAPES, Case, Shapes, relative_error, tensors
from benchmarks.kernels import time_ms
from benchmarks.tuning import SPACES, Workload, compile_workloads, compiler_processes, workloads_of
from qwen35mm_kernels import gpu
from qwen35mm_kernels.backend import why_not_triton
from qwen35mm_kernels.gpu.launch import trial
from qwen35mm_kernels.gpu.tables import Config, Table, read_table, table_path, write_table

MIN_GAIN = 0.02
MAX_LOSS = 0.05
MAX_RELATIVE_ERROR = 1e-2
_NUM_PROCESSES = min(12, os.cpu_count() or 1)

Key = tuple[str, str]
Configs = Mapping[Key, Config]


class Refused(Exception):
    """A configuration can't be chosen; the message says why."""


def choose(
    default_ms: Sequence[float], candidates_ms: Sequence[tuple[Config, Sequence[float]]]
) -> tuple[Config | None, float]:
    """The best candidate and its time relative to the default; None and 1 if none is fast enough.

    Args:
        default_ms: the default's time at each size.
        candidates_ms: each candidate's times. Of equally fast ones the first wins.
    """
    best, best_ratio = None, 1.0
    for config, times_ms in candidates_ms:
        ratios = [time / default for time, default in zip(times_ms, default_ms, strict=True)]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        if mean <= 1 - MIN_GAIN and max(ratios) <= 1 + MAX_LOSS and mean < best_ratio:
            best, best_ratio = config, mean
    return best, best_ratio


def tune(
    key: Key,
    default: Config,
    candidates: Sequence[Config],
    context: Configs,
    measures: Sequence[Callable[[Configs], float]],
) -> tuple[Config | None, float, list[tuple[Config, Refused]]]:
    """Tunes one kernel and shape: the configuration (None is the default), its relative time, and the refused ones.

    Args:
        context: configurations of the other kernels.
        measures: one for each size. Takes configurations and returns the operation's milliseconds, or raises Refused.

    Raises:
        Refused: the default itself was refused.
    """
    default_ms = [measure({**context, key: default}) for measure in measures]
    timed: list[tuple[Config, Sequence[float]]] = []
    refused: list[tuple[Config, Refused]] = []
    for config in candidates:
        times: list[float] = []
        try:
            for measure, most in zip(measures, default_ms, strict=True):
                times.append(measure({**context, key: config}))
                if times[-1] > most * (1 + MAX_LOSS):
                    raise Refused(f"slower by {times[-1] / most - 1:.0%} at one size")
            timed.append((config, times))
        except Refused as reason:
            refused.append((config, reason))
    chosen, ratio = choose(default_ms, timed)
    if chosen is not None:
        # Alternates, so that a card that gets warm slows both.
        again = [(measure({**context, key: default}), measure({**context, key: chosen})) for measure in measures]
        chosen, ratio = choose([first for first, _ in again], [(chosen, [second for _, second in again])])
    return chosen, ratio, refused


class Checked:
    """A case, its reference results, and the default's values of the tensors that it changes."""

    def __init__(self, case: Case, configs: Configs) -> None:
        self.case = case
        self._before = [tensor.clone() for tensor in case.changed]
        self._expected = tensors(case.expected())
        self.check(configs)
        self._expected += [tensor.clone() for tensor in case.changed]

    def check(self, configs: Configs) -> None:
        """Runs the case once and compares. Integers, such as token ids, must be equal.

        Raises:
            Refused: the result is wrong, or the card can't run it.
        """
        from triton.runtime.errors import OutOfResources

        for tensor, before in zip(self.case.changed, self._before, strict=True):
            tensor.copy_(before)
        try:
            with trial(configs):
                results = [*tensors(self.case.run(gpu)), *self.case.changed]
        except OutOfResources as error:
            raise Refused(f"doesn't fit this card: {error}".splitlines()[0]) from error
        # The first run has no expected values of the changed tensors yet.
        for ours, expected in zip(results, self._expected, strict=False):
            if not expected.is_floating_point():
                off = float(not torch.equal(ours, expected))
            else:
                off = relative_error(ours, expected)
            if not off <= MAX_RELATIVE_ERROR:
                raise Refused(f"WRONG: {self.case.operation}, {self.case.shape} is off by a relative {off:.1e}")

    def milliseconds(self, repeats: int, configs: Configs) -> float:
        self.check(configs)
        with trial(configs):
            return time_ms(lambda: self.case.run(gpu), graph=True, repeats=repeats).median


def asked_by(workload: Workload, configs: Configs, device: str) -> Table:
    """The kernels that a workload would launch, with their defaults. Launches nothing."""
    with trial(configs, lambda *arguments, **constants: None) as asked:
        workload.case(device).run(gpu)
    return asked


def by_shape(
    kernel: str, models: Sequence[Shapes], configs: Configs, device: str
) -> dict[str, tuple[Config, list[Workload]]]:
    """The shapes of a kernel's launches, each with its default and its workloads."""
    found: dict[str, tuple[Config, list[Workload]]] = {}
    for workload in workloads_of(kernel, models):
        for (asked, shape), default in asked_by(workload, configs, device).items():
            if asked == kernel:
                found.setdefault(shape, (default, []))[1].append(workload)
    return found


def compile_all(
    pool: ProcessPoolExecutor, key: Key, candidates: Sequence[Config], workloads: Sequence[Workload], context: Configs
) -> tuple[list[Config], list[tuple[Config, Refused]]]:
    """Splits candidates into those that compile and those that don't."""
    jobs = [pool.submit(compile_workloads, workloads, {**context, key: config}) for config in candidates]
    reasons = [(config, job.result()) for config, job in zip(candidates, jobs, strict=True)]
    failed = [(config, Refused(f"doesn't compile: {reason}")) for config, reason in reasons if reason is not None]
    return [config for config, reason in reasons if reason is None], failed


def known_entries(table: Table) -> Table:
    """The table without entries that no kernel asks for."""
    known = {
        (kernel, shape): config
        for (kernel, shape), config in table.items()
        if kernel in SPACES and config.blocks.keys() == SPACES[kernel].blocks.keys()
    }
    for kernel, shape in sorted(table.keys() - known.keys()):
        print(f"{kernel} {shape}: dropped from the table, no kernel asks for it.", file=sys.stderr)
    return known


def has_kernel(kernel: str, capability: int) -> bool:
    """Whether a card of this compute capability (89 is 8.9) can run the kernel: FP8 needs 8.9."""
    return capability >= 89 or not kernel.startswith("fp8")


def tune_all(
    kernels: Sequence[str],
    models: Sequence[Shapes],
    path: Path,
    origin: dict[str, str | None],
    repeats: int,
    budget_s: float,
    device: str = "cuda",
) -> Iterator[Sample]:
    """Tunes one kernel after the other and writes the table after each shape, until the time is over. Yields rows."""
    stop_at = time.monotonic() + budget_s
    table = known_entries(read_table(path))
    major, minor = torch.cuda.get_device_capability()
    with compiler_processes(10 * major + minor, _NUM_PROCESSES) as pool:
        for kernel in kernels:
            if not has_kernel(kernel, 10 * major + minor):
                continue
            # Configurations of earlier kernels decide whether this kernel runs, and at which shapes.
            for shape, (default, workloads) in by_shape(kernel, models, table, device).items():
                if time.monotonic() > stop_at:
                    print(f"Out of time: {kernel} {shape} and the rest stay as they were.", file=sys.stderr)
                    return
                key = (kernel, shape)
                others = {each: config for each, config in table.items() if each != key}
                candidates = SPACES[kernel].candidates(shape, default)
                # The default first, so that the operation's other kernels are compiled only once.
                compile_all(pool, key, [default], workloads, others)
                compiled, failed = compile_all(pool, key, candidates, workloads, others)
                cases = [Checked(workload.case(device), {**others, key: default}) for workload in workloads]
                measures = [partial(case.milliseconds, repeats) for case in cases]
                chosen, ratio, refused = tune(key, default, compiled, others, measures)
                table = others if chosen is None else {**others, key: chosen}
                write_table(path, table, origin)
                for config, reason in [*failed, *refused]:
                    print(f"  {kernel} {shape}, {text_of(config)}: {reason}", file=sys.stderr)
                row: Sample = {"kernel": kernel, "shape": shape, "default": text_of(default)}
                row |= {"chosen instead": None if chosen is None else text_of(chosen), "of its time": ratio}
                row |= {"candidates": len(candidates), "refused": len(failed) + len(refused)}
                print(row, file=sys.stderr, flush=True)
                yield row


def text_of(config: Config) -> str:
    blocks = " ".join(f"{name}={size}" for name, size in config.blocks.items())
    return f"{blocks} warps={config.num_warps} stages={config.num_stages}"


def to_try(kernel: str, models: Sequence[Shapes]) -> list[Sample]:
    """The candidates of a kernel. Omits kernels that run only with other configurations."""
    return [
        {
            "kernel": kernel,
            "shape": shape,
            "default": text_of(default),
            "candidates": len(SPACES[kernel].candidates(shape, default)),
            "workloads": len(workloads),
        }
        for shape, (default, workloads) in by_shape(kernel, models, {}, "meta").items()
    ]


def origin_of() -> dict[str, str | None]:
    """The versions and the card that a table's numbers depend on."""
    import triton

    driver = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    card, versions = torch.cuda.get_device_name(), {"torch": str(torch.__version__), "triton": triton.__version__}
    return {"card": card, "cuda": torch.version.cuda, "driver": driver, **versions}


@torch.inference_mode()
def main() -> None:
    options = parser(__doc__, model=False, repeats=30)
    options.add_argument("--only", default="", help="kernels whose name contains this")
    options.add_argument("--models", type=lambda text: text.split(","), default=list(SHAPES))
    options.add_argument("--budget", type=float, default=25, metavar="MINUTES", help="no new shape begins after that")
    options.add_argument("--dry-run", action="store_true", help="show what would be tried")
    arguments = parse(options)
    kernels = [kernel for kernel in SPACES if arguments.only in kernel]
    if set(arguments.models) - SHAPES.keys() or not kernels:
        options.error(f"--models takes {', '.join(SHAPES)}; --only takes a part of one of {', '.join(SPACES)}.")
    models = [SHAPES[name] for name in arguments.models]
    if arguments.dry_run:
        rows = [row for kernel in kernels for row in to_try(kernel, models)]
        return report("tune_kernels", arguments, {"Candidates": rows})
    if not torch.cuda.is_available():
        sys.exit("Tuning needs an NVIDIA card. Without one, --dry-run shows what would be tried.")
    if (why_not := why_not_triton("cuda")) is not None:
        sys.exit(f"There is nothing to tune: {why_not}.")
    torch.manual_seed(0)
    path, origin = table_path(torch.cuda.get_device_name()), origin_of()
    try:
        rows = list(tune_all(kernels, models, path, origin, arguments.repeats, 60 * arguments.budget))
    except Refused as reason:
        sys.exit(f"A default configuration doesn't work on this card, so nothing else can be tuned: {reason}")
    return report("tune_kernels", arguments, {f"The table is in {path}": rows}, origin=origin)


if __name__ == "__main__":
    main()
