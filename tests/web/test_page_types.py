"""What the page's scripts take the program's requests for (assets/web/common/types.d.ts) against those there are."""

from __future__ import annotations

import re

from qwen35mm.assets import asset_path
from qwen35mm.http.requests import requests_of
from qwen35mm.web.serving.api import Api
from qwen35mm.web.serving.files import Files
from qwen35mm.web.serving.models import Models
from qwen35mm.web.serving.previews import Previews
from qwen35mm.web.serving.temporary import EndsTemporary
from qwen35mm.web.serving.texts import Texts
from qwen35mm.web.serving.tool_servers import ToolSettings


def test_the_page_declares_the_requests_there_are() -> None:
    declared = (
        asset_path("web/common/types.d.ts").read_text("utf-8").split("interface Methods {", 1)[1].split("\n}", 1)[0]
    )
    there_are = requests_of(Api, Models, Previews, Texts, Files, EndsTemporary, ToolSettings)
    assert sorted(re.findall(r"^  (\w+)\(", declared, re.MULTILINE)) == sorted(there_are)
