"""The adapter's folder: the best adapter so far, and in `.qwen35mm-tune` what a killed run resumes from.

adapter_config.json, adapter_model.safetensors     as PEFT writes them; complete, or not there yet
.qwen35mm-tune/run.json                            identifies data and settings
.qwen35mm-tune/checkpoint-N/                       transformers' own; `complete` is its last file
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qwen35mm.captioning.manifest.files import RunLock, disk_errors, replacing, sync_folder
from qwen35mm.captioning.records import printable
from qwen35mm.errors import ConfigError

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_COMPLETE = "complete"
_RUN_FILE = "run.json"
_LOCK_FILE = "run.lock"
_TRAINING = ".qwen35mm-tune"


class AdapterFolder:
    """The folder of an adapter that is being made; locked until `close`.

    Attributes:
        training: the folder for checkpoints.

    Raises:
        CaptioningError, OutputError: another training writes there, or it can't be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.training = path / _TRAINING
        with disk_errors(printable(path.name)):
            self.training.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(self.training / _LOCK_FILE, f"to {printable(path.name)}")

    def close(self) -> None:
        """Unlocks it for other trainings; without a run to resume, also removes what was only there for one."""
        is_over = not (self.training / _RUN_FILE).exists()
        if is_over:
            self._clear()
            shutil.rmtree(self.training / "weights", ignore_errors=True)
        self._lock.release()
        if is_over:
            (self.training / _LOCK_FILE).unlink(missing_ok=True)
            # Files of others stay.
            with contextlib.suppress(OSError):
                self.training.rmdir()

    def begin(self, run: Mapping[str, Any], *, restart: bool) -> Path | None:
        """Makes it ready for a run; returns the checkpoint to resume from, if there is one.

        Args:
            run: identifies the run by JSON values: the model, the samples and the settings.
            restart: whether to drop what another run left, or this one.

        Raises:
            ConfigError: it holds the adapter of a finished run, or what another run left.
            OutputError: it can't be written to.
        """
        known = self._known()
        if restart or (known is None and not (self.path / WEIGHTS_FILE).exists()):
            # Nobody knows whose checkpoints these are.
            self._clear()
        elif known is None and (self.path / WEIGHTS_FILE).exists():
            raise ConfigError(
                f"'{printable(self.path.name)}' holds a finished adapter. Name another folder with --out, or replace "
                "it with --restart."
            )
        elif known is not None and known != dict(run):
            changed = ", ".join(name for name in run if known.get(name) != run[name])
            raise ConfigError(
                f"'{printable(self.path.name)}' holds an unfinished training with other {changed}. Use the same as "
                "then, name another folder with --out, or begin anew with --restart."
            )
        with disk_errors(self.training.name), replacing(self.training / _RUN_FILE) as file:
            file.write(json.dumps(dict(run), indent=1).encode())
        return self._latest()

    def complete(self, step: int) -> None:
        """Marks a checkpoint as complete, durably. Raises OutputError."""
        folder = self.training / f"checkpoint-{step}"
        with disk_errors(folder.name):
            for path in folder.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            (folder / _COMPLETE).touch()
            sync_folder(folder)

    def keep(self, save: Callable[[Path], None]) -> None:
        """Replaces the adapter by the one that `save` writes into a folder. A reader finds the old or the new one.

        Raises OutputError.
        """
        made = self.training / "best"
        with disk_errors(self.path.name):
            shutil.rmtree(made, ignore_errors=True)
            save(made)
        # The same in every adapter of a run, so the weights decide which one it is.
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            with replacing(self.path / name) as file:
                file.write((made / name).read_bytes())
        shutil.rmtree(made, ignore_errors=True)

    def finish(self) -> None:
        """Removes what is only there to resume. Raises OutputError."""
        with disk_errors(self.training.name):
            # First, so that a kill leaves a finished adapter.
            (self.training / _RUN_FILE).unlink(missing_ok=True)
            self._clear()

    def _known(self) -> dict[str, Any] | None:
        try:
            return json.loads((self.training / _RUN_FILE).read_bytes())
        except (OSError, ValueError):
            return None

    def _clear(self) -> None:
        for path in (*self.training.glob("checkpoint-*"), self.training / "best"):
            shutil.rmtree(path, ignore_errors=True)

    def _latest(self) -> Path | None:
        """The latest complete checkpoint; incomplete ones are removed."""
        found: list[tuple[int, Path]] = []
        for path in self.training.glob("checkpoint-*"):
            number = path.name.rpartition("-")[2]
            if number.isdecimal() and (path / _COMPLETE).exists():
                found.append((int(number), path))
            else:
                shutil.rmtree(path, ignore_errors=True)
        return max(found)[1] if found else None


def digest_of(*values: Any) -> str:
    """A short digest of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
