"""Forked children behave as started ones do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.children import environment


def test_what_it_says_and_its_exit_code(tmp_path: Path) -> None:
    done = forked.run("tests.forked_child", "fail", text="words\n", cwd=tmp_path)
    assert done.returncode == 3
    assert json.loads(done.stdout) == {"cwd": str(tmp_path), "argv": ["fail"], "stdin": "words\n"}
    assert done.stderr == "failed\nat exit\n"


def test_variables_are_the_given_ones_alone() -> None:
    done = forked.run("tests.forked_child", "environment", env=environment(ONE="1"))
    started = subprocess.run(
        [sys.executable, "-m", "tests.forked_child", "environment"],
        env=environment(ONE="1"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == json.loads(started.stdout)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_ends_it(number: signal.Signals) -> None:
    process = forked.ForkedProcess("tests.forked_child", "wait")
    assert process.stdout.readline() == "waits\n"
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait() == -number


def test_ctrl_c_is_a_keyboard_interrupt() -> None:
    process = forked.ForkedProcess("tests.forked_child", "wait")
    assert process.stdout.readline() == "waits\n"
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert errors.endswith("KeyboardInterrupt\nat exit\n")
    assert process.returncode == 1
