"""`transformers serve`, in a process of its own: arguments as the command takes them.

Its reader of videos wants torchvision, of which there is no build for every PyTorch; without it the command doesn't
start. Where it is missing nothing reads videos here. All else is the command's own.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


class NoVideos(dict[str, Any]):
    """Stands where a processor has its reader of videos."""

    model_input_names = ()

    def to_dict(self) -> dict[str, Any]:
        return {}


def without_videos() -> None:
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
    from transformers.processing_utils import ProcessorMixin

    check = ProcessorMixin.check_argument_for_proper_class

    def check_others(self: Any, argument_name: str, argument: Any) -> Any:
        return type(argument) if argument_name == "video_processor" else check(self, argument_name, argument)

    AutoVideoProcessor.from_pretrained = lambda *_, **__: NoVideos()
    ProcessorMixin.check_argument_for_proper_class = check_others


if __name__ == "__main__":
    if importlib.util.find_spec("torchvision") is None:
        without_videos()
    from transformers.cli.transformers import main

    sys.argv = ["transformers", "serve", *sys.argv[1:]]
    main()
