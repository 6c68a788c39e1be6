"""A server of the bundled model, as a process: `python -m tests.server.served KEY...`. When it is ended it looks after
itself, and prints `whole` where nothing was lost."""

from __future__ import annotations

import sys

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.engine import EngineSettings
from qwen35mm.http.run import run
from qwen35mm.server.app import create_app
from qwen35mm.server.keys import Keys


def main() -> None:
    backend = LocalBackend.load(demo_model_path(), settings=EngineSettings(slots=4))
    try:
        run(
            create_app(backend, keys=Keys(sys.argv[1:])),
            host="127.0.0.1",
            port=0,
            line=lambda url: f"qwen35mm serves {backend.loaded.name} on {url}/v1",
        )
        assert backend.wait_idle(60)
        assert backend.engine._engine is not None
        backend.engine._engine.check_integrity()
        print("whole", flush=True)
    finally:
        backend.close()


if __name__ == "__main__":
    main()
