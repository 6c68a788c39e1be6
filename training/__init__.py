"""Makes `assets/demo`: a tiny Qwen3.5 checkpoint, trained from scratch on scenes that this package draws."""
