"""The chat page in a process of its own, as a person starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.forked import ForkedProcess

# Only reached where a test fails.
PATIENCE_S = 60


class PageProcess:
    """A command that serves the page on the bundled model; keeps everything that it writes under `folder`.

    `python -m MODULE` is forked from a process that has imported everything; any other command is started.
    """

    def __init__(self, command: Sequence[str], folder: Path, **environment: str) -> None:
        own = {"GRADIO_TEMP_DIR": str(folder / "uploads"), "XDG_CACHE_HOME": str(folder / "caches")}
        own["XDG_DATA_HOME"] = str(folder / "data")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("QWEN35MM_")}
        variables = {**inherited, **own, **environment}
        self._process: ForkedProcess | subprocess.Popen[str]
        if command[:2] == [sys.executable, "-m"]:
            self._process = ForkedProcess(*command[2:], cwd=folder, env=variables)
        else:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=variables,
                cwd=folder,
                preexec_fn=_answer_signals,
            )

    def wait_for_url(self) -> str:
        """The page's address, with its token, once it is served."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"qwen35mm chats with \S+ on (http://127\.0\.0\.1:\d+/\S*) \(Ctrl-C ends it\)", line)
        assert found, line + self.wait()[1]
        return found[1]

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Sends the signal; the exit code and standard error."""
        self._process.send_signal(number)
        return self.wait()

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self._process.kill()
        self.wait()

    def wait(self) -> tuple[int, str]:
        """The exit code and standard error of a process that ends by itself."""
        try:
            _, errors = self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        assert self._process.returncode is not None
        return self._process.returncode, errors


def _answer_signals() -> None:
    # Whoever runs the tests in the background, or with nohup, has them ignored, and a child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
