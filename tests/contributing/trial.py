"""`python -m tests.contributing.trial`: runs the program on standard input with the packages of the copy it is in.

A fork of `tests.forked` has this tree's packages, and forgets them first.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    program = sys.stdin.read()
    for name in [name for name in sys.modules if name.startswith("qwen35mm")]:
        del sys.modules[name]
    sys.path[:0] = [str(Path.cwd() / name) for name in (".", "kernels", "preprocess")]
    exec(program, {"__name__": "__main__"})
