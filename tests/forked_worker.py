"""What xdist starts in place of Python: a fork of what has imported everything becomes the worker."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if sys.argv[1:] == ["forked"]:
        exec(eval(sys.stdin.readline()))  # as the Python that xdist would start
    else:
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
        from tests.forked import work

        sys.exit(work())
