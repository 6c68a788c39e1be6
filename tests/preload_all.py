"""What workers of xdist find imported besides: what takes longest of all that tests import."""

import contextlib
import gc

import tests.preload  # noqa: F401

gc.disable()
for _name in (
    *("tests.oracle", "tests.tiny", "pytest", "hypothesis"),
    *("anthropic", "openai", "schemathesis", "playwright.sync_api", "compressed_tensors"),
):
    with contextlib.suppress(ImportError):  # what is missing is said by the tests that need it
        __import__(_name)
gc.freeze()
gc.enable()
