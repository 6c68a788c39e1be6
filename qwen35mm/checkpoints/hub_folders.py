"""Folders of the Hugging Face Hub on this machine: downloaded once, and found without a network afterwards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from qwen35mm.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", re.ASCII)


def may_be_hub_id(text: str) -> bool:
    """Whether a text that names no file is a Hub id, such as `Qwen/Qwen3.5-2B`."""
    return _HUB_ID.fullmatch(text) is not None


def hub_folder(hub_id: str, patterns: Sequence[str]) -> Path:
    """The folder with the files of a repository that match; it lacks those that the Hub doesn't have.

    Raises:
        CheckpointError: it can't be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise CheckpointError(
            f"'{hub_id}' asks for your consent: accept its terms on its page on huggingface.co, then log in with "
            "`hf auth login`."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"The Hugging Face Hub has no model '{hub_id}', and there is no such folder either. Check the spelling; "
            "a private model needs `hf auth login`."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"'{hub_id}' isn't a folder here and couldn't be downloaded: "
            f"{error.strerror or 'Hugging Face does not answer'}. Check the network, or give a folder that you have."
        ) from error


def shown_name(folder: Path) -> str:
    """A folder's name for messages: the Hub id of one in the Hugging Face cache."""
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.name
