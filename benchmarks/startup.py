"""How long it takes from `qwen35mm chat` to a page that can be used, and where the time goes.

    python -m benchmarks.startup [--model DIR] [--repeats 3]

Starts the command in a process of its own each time, and opens the page in a headless Chromium that runs already. The
first start after an installation compiles Python's files; it is printed apart, as run 1.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.web.browser import FLAGS, find_chromium


def start_once(browser: Browser, model: str | None) -> dict[str, float]:
    """Seconds from the command to: its address, the page's box, an answer's first word (with the demo's example)."""
    command = [sys.executable, "-m", "qwen35mm", "chat", "--port", "0", *(("--model", model) if model else ())]
    with tempfile.TemporaryDirectory() as folder:
        kept = {
            "XDG_CACHE_HOME": f"{folder}/cache",
            "XDG_DATA_HOME": f"{folder}/data",
            "GRADIO_TEMP_DIR": f"{folder}/up",
        }
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **kept})
        try:
            assert process.stdout is not None
            found = re.search(r"(http://\S+/)", process.stdout.readline())
            assert found, "no address was printed"
            times = {"the server answers": time.perf_counter() - began}
            page = browser.new_page()
            page.goto(found[1])
            page.locator(".composer textarea").wait_for()
            times["the page can be used"] = time.perf_counter() - began
            if model is None:
                page.locator(".example").first.click()
                page.locator(".answer .block").first.wait_for()
                times["the first word of an answer"] = time.perf_counter() - began
            page.close()
            return times
        finally:
            process.terminate()
            process.communicate()


def import_times() -> list[tuple[float, str]]:
    """Seconds that the heaviest imports of the page take, with what they import."""
    code = "import qwen35mm.backends.local; import qwen35mm.web"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    wanted = ("torch", "transformers", "gradio", "av", "numpy", "PIL", "qwen35mm.web", "qwen35mm.backends.local")
    found = []
    for line in done.stderr.splitlines():
        parts = line.split("|")
        if len(parts) == 3 and parts[2].strip() in wanted and parts[1].strip().isdigit():
            found.append((int(parts[1]) / 1e6, parts[2].strip()))
    return sorted(found, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's folder; the bundled demo without it")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    model = str(Path(options.model).resolve()) if options.model else None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
        runs = []
        for number in range(1, options.repeats + 1):
            runs.append(start_once(browser, model))
            print(f"run {number}: " + ", ".join(f"{name} after {seconds:.2f} s" for name, seconds in runs[-1].items()))
        browser.close()
    for name in runs[0]:
        print(f"median: {name} after {statistics.median(run[name] for run in runs):.2f} s")
    print("imports, each with what it imports: " + ", ".join(f"{name} {s:.2f} s" for s, name in import_times()))


if __name__ == "__main__":
    main()
