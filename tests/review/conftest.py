"""The folders and media of captioning's tests."""

from tests.captioning.conftest import folder, media_in_process, tmp_path

__all__ = ["folder", "media_in_process", "tmp_path"]
