"""Replaces by a regular expression in a process of its own: an expression may backtrack for hours, holding the GIL.

The first line of the input is the expression, its flags and the template as JSON; each further line is a text. Each
line of the output is the text after the replacement.
"""

from __future__ import annotations

import json
import re
import sys


def main() -> None:
    pattern, flags, template = json.loads(sys.stdin.readline())
    compiled = re.compile(pattern, flags)
    for line in sys.stdin:
        print(json.dumps(compiled.sub(template, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
