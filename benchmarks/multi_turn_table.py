"""What multi_turn.py prints: a turn a row, then the ways to cut, then one JSON line."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.report import Spread, print_json, print_machine, print_table

Samples = dict[str, list[dict[str, Any]]]


def print_report(
    arguments: argparse.Namespace,
    info: dict[str, Any],
    turns: list[dict[str, Any]],
    prefills: list[dict[str, Any]],
    facts: dict[str, Any],
    shown: int,
) -> None:
    """All tables and the last line; `shown` is the least segment length of the first table."""
    chat = "thinking" if arguments.thinking else "not thinking"
    print(f"{arguments.model}, {arguments.dtype} on {arguments.device}, {chat}, segments of {shown} tokens or more")
    print_machine(info)
    _print_turns(turns, shown)
    print()
    rows = [_row(entry, turns, prefills, facts["state_bytes"]) for entry in prefills]
    print_table(
        [
            "the last prompt",
            "prefills",
            "cold, s",
            "of uncut",
            "warm TTFT, s",
            "of uncut",
            "tokens prefilled",
            "states",
        ],
        rows,
    )
    print("warm: medians over the turns from the second on. states: one for each cut, if all were kept.")
    if arguments.peer:
        print(
            f"transformers: {facts['num_extending']} of {len(turns) - 1} prompts begin with all of the one before, and "
            "only there could its kept cache be gone on from. It runs every prompt from nothing."
        )
    print_json(
        "multi_turn",
        model=arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        thinking=arguments.thinking,
        machine=info,
        min_segment=shown,
        facts=facts,
        turns=turns,
        prefills=prefills,
    )


def _print_turns(turns: list[dict[str, Any]], shown: int) -> None:
    first: Samples = turns[0]["engines"]
    header = ["turn", "prompt tokens"]
    columns = [("cold", "cold"), (f"warm-{shown}", "warm"), ("restart", "restart")]
    ours = [(engine, title) for engine, title in columns if engine in first]
    peers = [engine for engine in ("transformers", "server") if engine in first]
    for engine, title in ours:
        header.append(f"{title}: TTFT, s")
        header += ["cached", "prefilled"] if engine != "cold" else []
        header += ["commit, s"] if title == "warm" else []
    header += [f"{peer}: TTFT, s" for peer in peers] + (["cached"] if "server" in peers else [])
    rows = []
    for entry in turns:
        engines: Samples = entry["engines"]
        row: list[object] = [entry["turn"], engines[ours[0][0]][0]["num_prompt_tokens"]]
        for engine, _ in ours:
            samples = engines[engine]
            row.append(_seconds(samples))
            if engine != "cold":
                row += [samples[0]["num_cached_tokens"], samples[0]["num_prefilled_tokens"]]
            if engine == f"warm-{shown}":
                row.append(f"{statistics.median(sample['commit_s'] for sample in samples):.2f}")
        row += [_seconds(engines[peer]) for peer in peers]
        if "server" in peers:
            cached = engines["server"][0]["num_cached_tokens"]
            row.append("?" if cached is None else cached)
        rows.append(row)
    print_table(header, rows)


def _row(
    entry: dict[str, Any], turns: list[dict[str, Any]], prefills: list[dict[str, Any]], state_bytes: int
) -> list[object]:
    """One way to cut; the first entry is the uncut one."""
    way, uncut_s, cold = entry["min_segment"], prefills[0]["prefill_s"].median, entry["prefill_s"]
    start = [cold.text(2), f"{cold.median / uncut_s:.2f}"]
    if way is None:
        return ["uncut", entry["num_pieces"], *start, "", "", "", ""]
    if way == 0:
        return ["uncut, in pieces", entry["num_pieces"], *start, "", "", "", ""]
    warm = [sample for turn in turns[1:] for sample in turn["engines"][f"warm-{way}"]]
    ttft_s = statistics.median(sample["ttft_s"] for sample in warm)
    prefilled = statistics.median(sample["num_prefilled_tokens"] for sample in warm)
    states = f"{entry['num_segments']} x {state_bytes / 2**20:.1f} MiB"
    title = f"segments of {way} or more"
    return [title, entry["num_pieces"], *start, f"{ttft_s:.2f}", f"{ttft_s / uncut_s:.3f}", f"{prefilled:.0f}", states]


def _seconds(samples: list[dict[str, Any]]) -> str:
    values = [sample["ttft_s"] for sample in samples]
    return f"{values[0]:.2f}" if len(values) == 1 else Spread.of(values).text(2)
