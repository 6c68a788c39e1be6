"""Colours, fonts and the page's head. Everything is local: the page works, and looks the same, without a network."""

from __future__ import annotations

from urllib.parse import quote

from gradio.themes import Base, Font, colors, sizes

# A picture frame with a play mark.
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="8" fill="#4f46e5"/>'
    '<path d="M11 9.5v13a1 1 0 0 0 1.5.86l11-6.5a1 1 0 0 0 0-1.72l-11-6.5A1 1 0 0 0 11 9.5z" fill="#fff"/></svg>'
)
# In this order: later ones have the last word.
_STYLES = ("base", "sidebar", "transcript", "answer", "code", "composer", "settings", "dialogs", "narrow")
HEAD = (
    f'<link rel="icon" type="image/svg+xml" href="data:image/svg+xml,{quote(ICON)}">'
    '<meta name="color-scheme" content="light dark">'
    + "".join(f'<link rel="stylesheet" href="qwen35mm/web/styles/{name}.css">' for name in _STYLES)
)

_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "DejaVu Sans", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")


def make_theme() -> Base:
    """Gradio's own parts, such as a login, in the page's colours."""
    return Base(
        primary_hue=colors.indigo,
        secondary_hue=colors.indigo,
        neutral_hue=colors.zinc,
        radius_size=sizes.radius_lg,
        font=[Font(name) for name in _SANS],
        font_mono=[Font(name) for name in _MONO],
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        body_text_color_subdued="*neutral_500",
        body_text_color_subdued_dark="*neutral_400",
        block_background_fill="white",
        block_background_fill_dark="*neutral_900",
        block_border_width="0px",
        block_shadow="none",
        border_color_primary="*neutral_200",
        border_color_primary_dark="*neutral_800",
        color_accent_soft="*primary_50",
        color_accent_soft_dark="*neutral_800",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_dark="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_hover_dark="*primary_500",
        button_primary_text_color="white",
    )
