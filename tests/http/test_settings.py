from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qwen35mm.errors import ConfigError
from qwen35mm.http.settings import HttpSettings


def test_what_can_be_used(tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    cert.write_text("")
    settings = HttpSettings(
        ("chat.example.org",),
        ("https://example.org:8443", "*"),
        ("http://10.0.0.1",),
        ("10.0.0.0/8", "::1"),
        "/chat",
        cert,
    )
    assert settings.scheme == "https"
    assert HttpSettings().scheme == "http"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"allowed_hosts": ("example.org:80",)}, "--allowed-host takes a name"),
        ({"allowed_hosts": ("*",)}, "--allowed-host"),
        ({"cors_origins": ("example.org",)}, "--cors-origin takes an origin"),
        ({"embed_origins": ("*",)}, "--embed-origin"),
        ({"embed_origins": ("https://a; script-src *",)}, "--embed-origin"),
        ({"trusted_proxies": ("localhost",)}, "--trust-proxy"),
        ({"base_path": "/a/../b c"}, "--base-path"),
        ({"tls_key": Path("key.pem")}, "--tls-cert"),
        ({"tls_cert": Path("nowhere.pem")}, "no file nowhere.pem"),
    ],
)
def test_what_cannot(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HttpSettings(**values)
