"""Writes the table of kernel configurations of this card, kernels/qwen35mm_kernels/gpu/configs/<card>.json.

    python -m benchmarks.tune_kernels                    every kernel at the shapes of Qwen3.5
    python -m benchmarks.tune_kernels --only gdn --models 9B,27B
    python -m benchmarks.tune_kernels --dry-run          what would be tried; needs no card

Each kernel is tuned inside the public operations that take it, at several sizes, from cold caches and as CUDA graphs.
What is tried, and on what, is in tuning_spaces.py, and how it is chosen in tuning.py. A result that
isn't the reference's is told and never chosen. The table is written after every shape, and entries that this run
doesn't tune stay: it may be stopped at any time and run again. Commit the table afterwards: it decides how kernels
round, and is part of the cache's fingerprint.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.kernel_cases import SHAPES, Shapes
from benchmarks.kernels import time_ms
from benchmarks.report import machine, print_json, print_machine, print_table
from benchmarks.tuning import Checked, Configs, Outcome, Refused, Wrong, tune
from benchmarks.tuning_compile import compile_workloads, processes
from benchmarks.tuning_spaces import SPACES, Workload, workloads_of
from qwen35mm_kernels import gpu
from qwen35mm_kernels.backend import why_not_triton
from qwen35mm_kernels.gpu.launch import trial
from qwen35mm_kernels.gpu.tables import Config, Table, read_table, table_path, write_table

# No kernel and shape has more candidates that could be compiled side by side.
_NUM_PROCESSES = min(12, os.cpu_count() or 1)
# For the estimate: to compile a candidate for all models on one core, and a guess of checking and timing it at a size.
_COMPILE_S = 3.0
_TIME_S = 0.1


def asked_by(workload: Workload, configs: Configs, device: str) -> Table:
    """The defaults of what a workload asks for. Nothing is launched."""
    with trial(configs, lambda *arguments, **constants: None) as asked:
        workload.case(device).run(gpu)
    return asked


def by_shape(
    kernel: str, models: Sequence[Shapes], configs: Configs, device: str
) -> dict[str, tuple[Config, list[Workload]]]:
    """The shapes that a kernel is asked for, each with its default and its workloads."""
    found: dict[str, tuple[Config, list[Workload]]] = {}
    for workload in workloads_of(kernel, models):
        for (asked, shape), default in asked_by(workload, configs, device).items():
            if asked == kernel:
                found.setdefault(shape, (default, []))[1].append(workload)
    return found


def compile_all(
    pool: ProcessPoolExecutor,
    key: tuple[str, str],
    candidates: Sequence[Config],
    workloads: Sequence[Workload],
    context: Configs,
) -> tuple[list[Config], list[tuple[Config, Refused]]]:
    """The candidates that compile, and the others."""
    jobs = [pool.submit(compile_workloads, workloads, {**context, key: config}) for config in candidates]
    reasons = [job.result() for job in jobs]
    pairs = list(zip(candidates, reasons, strict=True))
    return (
        [config for config, reason in pairs if reason is None],
        [(config, Refused(f"doesn't compile: {reason}")) for config, reason in pairs if reason is not None],
    )


def tune_shape(
    key: tuple[str, str],
    default: Config,
    workloads: Sequence[Workload],
    context: Configs,
    pool: ProcessPoolExecutor,
    repeats: int,
    device: str,
) -> Outcome:
    """Compiles, checks and times every candidate for one kernel and shape."""
    candidates = SPACES[key[0]].candidates(key[1], default)
    # The default first: what the operation launches besides is then compiled once, not in every process.
    compile_all(pool, key, [default], workloads, context)
    compiled, failed = compile_all(pool, key, candidates, workloads, context)
    cases = [Checked(workload.case(device), {**context, key: default}) for workload in workloads]

    def milliseconds(checked: Checked, configs: Configs) -> float:
        checked.check(configs)
        with trial(configs):
            return time_ms(lambda: checked.case.run(gpu), graph=True, repeats=repeats).median

    outcome = tune(key, default, compiled, context, [functools.partial(milliseconds, checked) for checked in cases])
    return dataclasses.replace(outcome, num_candidates=len(candidates), refused=[*failed, *outcome.refused])


def known_entries(table: Table) -> Table:
    """A table without what kernels no longer ask for."""
    known = {
        (kernel, shape): config
        for (kernel, shape), config in table.items()
        if kernel in SPACES and config.blocks.keys() == SPACES[kernel].blocks.keys()
    }
    for kernel, shape in sorted(table.keys() - known.keys()):
        print(f"{kernel} {shape}: dropped from the table, no kernel asks for it.", file=sys.stderr)
    return known


def compiles(kernel: str, capability: int) -> bool:
    """Whether a card of a compute capability (89 is 8.9) can have it: eight-bit floats came with 8.9."""
    return capability >= 89 or not kernel.startswith("fp8")


def tune_all(
    kernels: Sequence[str],
    models: Sequence[Shapes],
    path: Path,
    origin: dict[str, str | None],
    repeats: int,
    budget_s: float,
    device: str = "cuda",
) -> Iterator[Outcome]:
    """Tunes one kernel after the other and writes the table after each shape, until the time is over."""
    stop_at = time.monotonic() + budget_s
    table = known_entries(read_table(path))
    major, minor = torch.cuda.get_device_capability()
    with processes(10 * major + minor, _NUM_PROCESSES) as pool:
        for kernel in kernels:
            if not compiles(kernel, 10 * major + minor):
                continue
            # Asked for as the kernels before it were chosen: they decide whether, and for what, it runs.
            for shape, (default, workloads) in by_shape(kernel, models, table, device).items():
                if time.monotonic() > stop_at:
                    print(f"The time is over: {kernel} {shape} and what follows stay as they were.", file=sys.stderr)
                    return
                others = {key: config for key, config in table.items() if key != (kernel, shape)}
                outcome = tune_shape((kernel, shape), default, workloads, others, pool, repeats, device)
                table = others if outcome.chosen is None else {**others, (kernel, shape): outcome.chosen}
                write_table(path, table, origin)
                yield outcome


def text_of(config: Config) -> str:
    blocks = " ".join(f"{name}={size}" for name, size in config.blocks.items())
    return f"{blocks} warps={config.num_warps} stages={config.num_stages}"


def log(outcome: Outcome) -> None:
    for config, reason in outcome.refused:
        loud = "!!! " if isinstance(reason, Wrong) else ""
        print(f"  {loud}{outcome.kernel} {outcome.shape}, {text_of(config)}: {reason}", file=sys.stderr)
    found = "the default stays" if outcome.chosen is None else text_of(outcome.chosen)
    tried = outcome.num_candidates - len(outcome.refused)
    counts = f"{tried} of {outcome.num_candidates} candidates timed at every size, {len(outcome.refused)} out"
    print(f"{outcome.kernel} {outcome.shape}: {found} (x{outcome.ratio:.3f}; {counts})", file=sys.stderr, flush=True)


def print_spaces(kernels: Sequence[str], models: Sequence[Shapes]) -> None:
    """What would be tried, and about how long that takes."""
    rows, compiles, timings = [], 0, 0
    for kernel in kernels:
        for shape, (default, workloads) in by_shape(kernel, models, {}, "meta").items():
            count = len(SPACES[kernel].candidates(shape, default))
            rows.append([kernel, shape, text_of(default), count, len(workloads)])
            compiles += count
            timings += count * len(workloads)
    print_table(["kernel", "shape", "default", "candidates", "workloads"], rows)
    minutes = (compiles * _COMPILE_S / _NUM_PROCESSES + timings * _TIME_S) / 60
    print(
        f"{compiles} candidates and {timings} timings: with {_NUM_PROCESSES} processes about {minutes:.0f} minutes, "
        "by reckoning. Kernels that only run where another configuration is chosen come in addition."
    )


def origin_of() -> dict[str, str | None]:
    """What a table's numbers depend on."""
    import triton

    driver = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {
        "card": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "driver": driver,
        "torch": str(torch.__version__),
        "triton": triton.__version__,
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--budget", type=float, default=25, metavar="MINUTES", help="no new shape begins after that")
    parser.add_argument("--dry-run", action="store_true", help="print what would be tried")
    arguments = parser.parse_args()
    kernels = [kernel for kernel in SPACES if arguments.only in kernel]
    unknown = set(arguments.models) - SHAPES.keys()
    if unknown or not kernels:
        parser.error(f"--models are {', '.join(SHAPES)}; --only is a part of one of {', '.join(SPACES)}.")
    models = [SHAPES[name] for name in arguments.models]
    if arguments.dry_run:
        print_spaces(kernels, models)
        return
    if not torch.cuda.is_available():
        sys.exit("Tuning needs an NVIDIA card. Without one: --dry-run prints what would be tried.")
    why_not = why_not_triton("cuda")
    if why_not is not None:
        sys.exit(f"There is nothing to tune: {why_not}.")
    torch.manual_seed(0)
    path, origin, outcomes = table_path(torch.cuda.get_device_name()), origin_of(), []
    try:
        for outcome in tune_all(kernels, models, path, origin, arguments.repeats, 60 * arguments.budget):
            log(outcome)
            outcomes.append(outcome)
    except Refused as reason:
        sys.exit(f"A default configuration doesn't work on this card, so nothing else can be tuned: {reason}")
    info = machine()
    print_machine(info)
    rows = [
        [o.kernel, o.shape, text_of(o.default), "-" if o.chosen is None else text_of(o.chosen), f"{o.ratio:.3f}"]
        for o in outcomes
    ]
    print_table(["kernel", "shape", "default", "chosen instead", "of the default's time"], rows)
    print(f"The table is in {path}.")
    results = [
        {"kernel": o.kernel, "shape": o.shape, "tuned": o.chosen is not None, "ratio": o.ratio} for o in outcomes
    ]
    print_json("tune_kernels", arguments, machine=info, origin=origin, results=results)


if __name__ == "__main__":
    main()
