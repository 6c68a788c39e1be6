"""The chat page, with the libraries of the extra `chat`."""

from qwen35mm.errors import MissingExtraError

try:
    from qwen35mm.web.serving.app import build_app
    from qwen35mm.web.serving.server import Server, check, launch, serve
except ModuleNotFoundError as error:
    raise MissingExtraError("The chat page", "chat") from error

__all__ = ["Server", "build_app", "check", "launch", "serve"]
