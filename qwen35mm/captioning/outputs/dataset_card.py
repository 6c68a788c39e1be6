"""The card of a dataset folder: a `README.md` for Hugging Face's Hub and `datasets`. A person's own card stays.

A folder of parquet files gets none: pyarrow and pandas would read it as a data file.
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
        suffixes: the media's suffixes, with dots, under "image", "video" or both. With both, each kind has its own
            file of rows.
    """
    first, *others = kinds = sorted(suffixes)
    rows = rows_file(first) if others else "metadata.jsonl"
    names = "".join(f"  - '{name}'\n" for name in (rows, *(f"**/*{each}" for each in sorted(suffixes[first]))))
    head = f"configs:\n- config_name: {first}s\n  data_files:\n{names}  metadata_filenames: ['{rows}']\n"
    text = f"{' and '.join(f'{each}s' for each in kinds).capitalize()} with captions: `text` in `metadata.jsonl`."
    loaded = f'{first}s = load_dataset("FOLDER")["train"]'
    for other in others:
        # A dataset has one builder for all its configurations.
        told = f'metadata_filenames=["{rows_file(other)}"]'
        loaded += f'\n{other}s = load_dataset("{other}folder", data_dir="FOLDER", {told})["train"]'
    return f"---\n{head}---\n{_OURS}\n\n# Captions\n\n{text}\n\n{_LOADED.format(loaded)}\n"


def rows_file(kind: str) -> str:
    """The file with one kind's rows in a folder of images and videos."""
    return f"{kind}s.jsonl"


def write_card(folder: Path, text: str) -> None:
    """Writes a card, unless a person's own card is there. Raises OSError."""
    path = folder / CARD
    with contextlib.suppress(FileNotFoundError):
        old = path.read_text("utf-8", "replace")
        if _OURS not in old or old == text:
            return
    with replacing(path) as file:
        file.write(text.encode())
