"""What tests/test_forked.py has run as a process of its own."""

import atexit
import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    if sys.argv[1] == "environment":
        print(json.dumps(dict(sorted(os.environ.items()))))
        sys.exit()
    atexit.register(lambda: print("at exit", file=sys.stderr))
    if sys.argv[1] == "wait":
        print("waits", flush=True)
        time.sleep(60)
    print(json.dumps({"cwd": str(Path.cwd()), "argv": sys.argv[1:], "stdin": sys.stdin.read()}))
    print("failed", file=sys.stderr)
    sys.exit(3)
