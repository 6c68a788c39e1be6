"""Runs, kills and a person at one text file, in any order: the person's text stays, ours is there once."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.strategies import integers, sampled_from

from qwen35mm.captioning.outputs import Mode
from qwen35mm.captioning.records import Record
from tests.captioning.kills import killed_at, needs_fork
from tests.captioning.outputs.helpers import leftovers, put, record, run

PROMPTS = ("ours-1", "ours-2", "ours-3")
TRIGGERS = ("", "ohwx")


class SidecarMachine(RuleBasedStateMachine):
    """One medium, its text file, and a person who writes a new word each time."""

    mode: Mode = "skip"

    @initialize(mode=sampled_from(["skip", "append", "prepend"]))
    def begin(self, mode: Mode) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.mode = mode
        self.item = put(self.folder, "a.jpg", 1)
        self.words = itertools.count()
        self.persons = ""
        self.added: set[str] = set()

    @property
    def path(self) -> Path:
        return self.folder / "a.txt"

    def text(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    def answer(self, prompt: str, trigger: str) -> list[Record]:
        made = record(self.item, f"{trigger}, {prompt}" if trigger else prompt, prompt)
        return [replace(made, trigger=trigger)]

    @rule(prompt=sampled_from(PROMPTS), trigger=sampled_from(TRIGGERS))
    def run_to_the_end(self, prompt: str, trigger: str) -> None:
        if not self.path.exists():
            self.added.clear()
        run(self.folder, self.answer(prompt, trigger), "sidecar", mode=self.mode)
        assert leftovers(self.folder) == []
        if self.mode == "skip":
            assert self.text() == (self.persons or (f"{trigger}, {prompt}\n" if trigger else f"{prompt}\n"))
        elif prompt not in self.added:
            assert prompt in self.text()
        self.added.add(prompt)

    @rule(prompt=sampled_from(PROMPTS), trigger=sampled_from(TRIGGERS), step=integers(0, 25))
    def run_and_kill(self, prompt: str, trigger: str, step: int) -> None:
        before = self.text()
        if not self.path.exists():
            self.added.clear()
        made = self.answer(prompt, trigger)
        killed_at(step, lambda: run(self.folder, made, "sidecar", mode=self.mode), torn_bytes=3)
        if self.text() != before:
            self.added.add(prompt)

    @rule()
    def person_writes(self) -> None:
        self.persons = f"mine-{next(self.words)}"
        self.path.write_text(self.persons)

    @rule()
    def person_adds(self) -> None:
        self.persons = f"mine-{next(self.words)}"
        self.path.write_text(self.text() + self.persons)
        if self.mode == "skip":
            self.persons = self.text()

    @rule()
    def person_removes(self) -> None:
        self.path.unlink(missing_ok=True)
        self.persons = ""

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if hasattr(self, "folder"):
            text = self.text()
            assert self.persons in text
            assert all(text.count(prompt) <= 1 for prompt in PROMPTS)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


TestSidecars = needs_fork(SidecarMachine.TestCase)
TestSidecars.settings = settings(max_examples=max(1, settings().max_examples // 10), stateful_step_count=12)
