"""Reads untrusted media in child processes that can be ended; shared by captioner, server and page.

decoders = Decoders(limits)                          # processes, started on demand
media = DecodingProcessor.of(processor, decoders)    # a MediaProcessor that reads in them
"""

from qwen35mm.decoding.answers import Answer
from qwen35mm.decoding.decoders import Decoders
from qwen35mm.decoding.processor import DecodingProcessor, asked_by, read_by

__all__ = ["Answer", "Decoders", "DecodingProcessor", "asked_by", "read_by"]
