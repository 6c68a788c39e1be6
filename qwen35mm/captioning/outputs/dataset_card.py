"""The card of a dataset, `README.md`, as the Hub and Hugging Face's `datasets` read it; somebody's own stays."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path

from qwen35mm.captioning.manifest.files import replacing

CARD = "README.md"
_OURS = (
    "<!-- Written by `qwen35mm caption`, and again after each run that changes it. Without this line it is yours. -->"
)
_LOADED = """```python
from datasets import load_dataset

{}
```"""


def card(kind: str, suffixes: Mapping[str, Collection[str]] | None) -> str:
    """A card.

    Args:
        kind: "parquet", or "folder" for media with `metadata.jsonl`.
        suffixes: of a folder's media, with their dots, by "image" and "video"; those that are there. Of both, each
            has a file of rows of its own.
    """
    if kind == "parquet":
        head = "configs:\n- config_name: default\n  data_files: '*.parquet'\n"
        text = "Each row is an image or a video with its caption. With `--embed-media`, `image` and `video` hold them."
        loaded = 'rows = load_dataset("parquet", data_files="FOLDER/*.parquet")["train"]'
    else:
        assert suffixes is not None
        kinds = sorted(suffixes)
        text = f"{' and '.join(f'{each}s' for each in kinds).capitalize()} with captions: `text` in `metadata.jsonl`."
        head = f"configs:\n- config_name: {kinds[0]}s\n  data_files:\n" if kinds else ""
        rows = rows_file(kinds[0]) if len(kinds) > 1 else "metadata.jsonl"
        head += "".join(f"  - '{name}'\n" for name in (rows, *(f"**/*{each}" for each in sorted(suffixes[kinds[0]]))))
        head += f"  metadata_filenames: ['{rows}']\n"
        loaded = f'{kinds[0]}s = load_dataset("FOLDER")["train"]'
        for other in kinds[1:]:
            # A dataset has one builder for all of its configurations.
            names = f'metadata_filenames=["{rows_file(other)}"]'
            loaded += f'\n{other}s = load_dataset("{other}folder", data_dir="FOLDER", {names})["train"]'
    return f"---\n{head}---\n{_OURS}\n\n# Captions\n\n{text}\n\n{_LOADED.format(loaded)}\n"


def rows_file(kind: str) -> str:
    """Where a folder of images and videos has the rows of one kind."""
    return f"{kind}s.jsonl"


def write_card(folder: Path, text: str) -> None:
    """Writes a card where there is none, or an older one of ours. Raises OSError."""
    path = folder / CARD
    with contextlib.suppress(FileNotFoundError):
        old = path.read_text("utf-8", "replace")
        if _OURS not in old or old == text:
            return
    with replacing(path) as file:
        file.write(text.encode())
