"""The card of a dataset folder, `README.md`, as Hugging Face's Hub and `datasets` read it; somebody's own stays.

A folder of parquet files gets none: pyarrow and pandas take every file in it for one of theirs.
"""

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


def card(suffixes: Mapping[str, Collection[str]]) -> str:
    """A card.

    Args:
        suffixes: of the media, with their dots, by "image" and "video"; those that are there. Of both, each has a file
            of rows of its own.
    """
    first, *others = kinds = sorted(suffixes)
    rows = rows_file(first) if others else "metadata.jsonl"
    names = "".join(f"  - '{name}'\n" for name in (rows, *(f"**/*{each}" for each in sorted(suffixes[first]))))
    head = f"configs:\n- config_name: {first}s\n  data_files:\n{names}  metadata_filenames: ['{rows}']\n"
    text = f"{' and '.join(f'{each}s' for each in kinds).capitalize()} with captions: `text` in `metadata.jsonl`."
    loaded = f'{first}s = load_dataset("FOLDER")["train"]'
    for other in others:
        # A dataset has one builder for all of its configurations.
        told = f'metadata_filenames=["{rows_file(other)}"]'
        loaded += f'\n{other}s = load_dataset("{other}folder", data_dir="FOLDER", {told})["train"]'
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
