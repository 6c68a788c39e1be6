"""Whether strangers can reach a page."""

from __future__ import annotations

import pytest

from qwen35mm.strangers import is_shared


@pytest.mark.parametrize(
    ("host", "shared"),
    [
        ("127.0.0.1", False),
        ("127.8.9.10", False),
        ("localhost", False),
        ("::1", False),
        ("[::1]", False),
        ("0.0.0.0", True),
        ("::", True),
        ("192.168.1.7", True),
        ("example.org", True),
        ("localhost.example.org", True),
        ("", True),
    ],
)
def test_only_this_machine_s_own_addresses_are_private(
    host: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPACE_ID", raising=False)
    assert is_shared(host) is shared


def test_a_space_is_shared_whatever_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACE_ID", "someone/something")
    assert is_shared("127.0.0.1")
