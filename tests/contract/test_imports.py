"""What costs nothing to import stays so: a page, a remote client or a script may live without torch."""

from __future__ import annotations

import subprocess
import sys


def test_no_torch_is_loaded() -> None:
    code = "import sys, qwen35mm.contract, qwen35mm.chat.replies.turns, qwen35mm.backends.remote.backend\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
