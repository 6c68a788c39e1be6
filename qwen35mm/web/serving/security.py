"""Gradio's application behind middleware of ours."""

from __future__ import annotations

from typing import Any

from gradio.route_utils import CustomCORSMiddleware
from gradio.routes import App
from starlette.middleware import Middleware


class GuardedApp(App):
    """Gradio's application behind middleware of ours: Gradio would put its own in front of what it is given.

    Its answers to other origins are left out: it lets every port of localhost, and on other addresses every website,
    read all that a browser's cookies open.
    """

    def add_middleware(self, middleware_class: Any, *args: Any, **kwargs: Any) -> None:
        """Adds it behind those that are there."""
        if middleware_class is not CustomCORSMiddleware:
            self.user_middleware.append(Middleware(middleware_class, *args, **kwargs))
