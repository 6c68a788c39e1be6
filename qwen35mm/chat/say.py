"""What is said on the page: see `qwen35mm_preprocess.say`, where all layers find it."""

from qwen35mm_preprocess.say import Said, decimal, english, percent, renamed, said_of, say, size, tokens

__all__ = ["Said", "decimal", "english", "percent", "renamed", "said_of", "say", "size", "tokens"]
