"""How outputs are named and opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qwen35mm.captioning.manifest.manifest import Manifest
from qwen35mm.captioning.outputs import Output, OutputSettings, OutputSpec, open_outputs, parse_output
from qwen35mm.errors import CaptioningError
from tests.captioning.outputs.helpers import captions_of, expected, leftovers, records_of, rows_of
from tests.children import environment


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("sidecar", OutputSpec("sidecar", ".txt")),
        ("sidecar:caption", OutputSpec("sidecar", ".caption")),
        ("sidecar:.a.b", OutputSpec("sidecar", ".a.b")),
        ("jsonl:C:\\a b.jsonl", OutputSpec("jsonl", "C:\\a b.jsonl")),
        ("parquet:p", OutputSpec("parquet", "p")),
        ("dataset:d/e", OutputSpec("dataset", "d/e")),
        ("webdataset:w", OutputSpec("webdataset", "w")),
    ],
)
def test_forms(text: str, spec: OutputSpec) -> None:
    assert parse_output(text) == spec


@pytest.mark.parametrize(
    "text",
    ["", "txt", "jsonl", "jsonl:", "csv:a", "sidecar:../x", "sidecar:.", "sidecar:.a/b", "sidecar:." + "x" * 300],
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(CaptioningError, match="webdataset:FOLDER"):
        parse_output(text)


@pytest.mark.parametrize("other", ["dataset:{}", "parquet:{}/metadata.jsonl", "jsonl:{}/x/../metadata.jsonl"])
def test_two_outputs_share_no_place(tmp_path: Path, manifest: Manifest, other: str) -> None:
    specs = [parse_output(f"jsonl:{tmp_path}/metadata.jsonl"), parse_output(other.format(tmp_path))]
    with pytest.raises(CaptioningError, match="Two outputs"):
        open_outputs(specs, manifest, OutputSettings())


# Parquet and tars share a folder's lock: each removes the leftovers of the other.
@pytest.mark.parametrize(
    ("first", "second"),
    [("jsonl", "jsonl"), ("dataset", "dataset"), ("parquet", "parquet"), ("webdataset", "parquet")],
)
def test_an_output_is_one_runs_at_a_time(tmp_path: Path, first: str, second: str) -> None:
    """Two machines of one `--shard` command, each with its own manifest and the same output."""

    def opened(manifest: Manifest, kind: str) -> list[Output]:
        return open_outputs([parse_output(f"{kind}:{out}")], manifest, OutputSettings())

    out = tmp_path / "out"
    manifests = [Manifest.open(tmp_path / f"state{number}" / "manifest.sqlite") for number in range(2)]
    (one,) = records_of(tmp_path / "media", ["a.png"])
    manifests[0].finish(one.key, one.caption)
    (output,) = opened(manifests[0], first)
    with pytest.raises(CaptioningError, match=f"process {os.getpid()}.*to (out|metadata.jsonl)"):
        opened(manifests[1], second)
    output.write(one)
    output.finish()
    output.close()
    assert captions_of(rows_of(f"{first}:{out}")) == expected([one])
    for _ in range(2):  # a refusal keeps no lock
        with pytest.raises(CaptioningError, match="not written by this run"):
            opened(manifests[1], first)
    assert leftovers(tmp_path) == []
    for manifest in manifests:
        manifest.close()


def test_only_parquet_needs_pyarrow(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path; from qwen35mm.captioning.manifest.manifest import Manifest\n"
        "from qwen35mm.captioning.outputs import OutputSettings, open_outputs, parse_output\n"
        "from qwen35mm.errors import MissingExtraError\n"
        "folder = Path(sys.argv[1]); manifest = Manifest.open(folder / 'm' / 'm.sqlite')\n"
        "def make(text):\n"
        "    return open_outputs([parse_output(text)], manifest, OutputSettings())\n"
        "make(f'webdataset:{folder}/w'), make(f'dataset:{folder}/d'), make('sidecar')\n"
        "try:\n    make(f'parquet:{folder}/p')\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    assert done.stdout == "Writing parquet needs the optional extra 'datasets': pip install 'qwen35mm[datasets]'.\n"
