"""A caption output is a class and one entry in outputs/__init__.py: `--output` opens it by its name then."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

from qwen35mm.captioning.outputs import _KINDS
from qwen35mm.cli.caption_options import CaptionOptions
from tests.contributing.copies import Copy

KINDS = "qwen35mm/captioning/outputs/__init__.py"
LAST = '    "parquet": _Kind('
IMPORT = "from qwen35mm.captioning.outputs.jsonl import JsonLines\n"
OUTPUT = """
from qwen35mm.captioning.outputs.jsonl import JsonLines
from qwen35mm.captioning.records import Record

class TabSeparated(JsonLines):
    def _line(self, record: Record) -> bytes:
        return f"{record.item.name}\\t{record.caption.text}\\n".encode()
"""
TRIAL = """
from pathlib import Path
from qwen35mm.captioning.items import Item
from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs import OutputSettings, Wants, open_outputs, parse_output
from qwen35mm.captioning.records import Caption, Record
spec = parse_output("tsv:captions.tsv")
manifest = Manifest.open(Path("manifest.sqlite"))
[output] = open_outputs([spec], manifest, OutputSettings())
caption = Caption(text="A cat.", kind="image", width=4, height=3, prompt="?", model="tiny")
record = Record(Item("a.png", b"png", "image", None, {}), b"key", b"content", caption)
assert output.wants(record.item, record.key) is Wants.CAPTION
manifest.finish(record.key, caption)
output.write(record)
assert output.wants(record.item, record.key) is Wants.DONE
print(Path("captions.tsv").read_text(), spec.media_folder)
"""


def test_it_is_chosen_and_written_after_a_class_and_an_entry(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    assert "got 'tsv:captions.tsv'" in copy.run(TRIAL).stderr
    (tmp_path / "qwen35mm/captioning/outputs/tab_separated.py").write_text(OUTPUT)
    copy.edit(KINDS, IMPORT, f"{IMPORT}from qwen35mm.captioning.outputs.tab_separated import TabSeparated\n")
    copy.edit(KINDS, LAST, f'    "tsv": _Kind("tsv:FILE", TabSeparated, has_media=False),\n{LAST}')
    done = copy.run(TRIAL)
    assert done.stdout == "a.png\tA cat.\n None\n", done.stderr


def test_the_help_of_the_command_names_every_output() -> None:
    option = get_type_hints(CaptionOptions, include_extras=True)["output"].__metadata__[0]
    assert [kind for kind in _KINDS if kind not in option.help] == []
