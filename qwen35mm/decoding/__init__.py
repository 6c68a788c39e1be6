"""Media of strangers are read in child processes, which can be ended: one kit for captioner, server and page.

decoders = Decoders(limits)                          # the processes, made when they are needed
media = DecodingProcessor.of(processor, decoders)    # a MediaProcessor that hands its work to them
"""

from qwen35mm.decoding.answers import Answer
from qwen35mm.decoding.decoders import Decoders
from qwen35mm.decoding.processor import DecodingProcessor, asked_by, read_by

__all__ = ["Answer", "Decoders", "DecodingProcessor", "asked_by", "read_by"]
