"""From token ids to the caller's text: whole characters, thinking and answer separated, stop strings removed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from qwen35mm.contract import Channel, FinishReason, SamplingParams, TextDelta, TokenLogprob
from qwen35mm.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class ThinkingTokens:
    """The control ids around thinking, the ids that close it once its budget is spent, and the ids after its end."""

    start_id: int
    end_id: int
    closing_ids: tuple[int, ...]
    gap_ids: tuple[int, ...]

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> ThinkingTokens | None:
        """None if the vocabulary lacks `<think>` or `</think>`."""
        start_id = tokenizer.control_ids.get("<think>")
        end_id = tokenizer.control_ids.get("</think>")
        if start_id is None or end_id is None:
            return None
        # As the family's templates render it: `</think>` on its own line, then an empty line.
        gap = tuple(tokenizer.encode_plain("\n\n"))
        return cls(start_id, end_id, (*tokenizer.encode_plain("\n"), end_id, *gap), gap)


class OutputProcessor:
    """Reads one reply's tokens in order.

    Args:
        tokenizer: the checkpoint's.
        params: this class applies its stop strings and ids, `min_tokens`, `ignore_eos`, `thinking_budget` and
            `max_tokens`.
        eos_ids: ids with which the model ends the reply.
        thinking: None if the vocabulary has no thinking tokens.
        num_thought: tokens of the prompt's unfinished thinking, 0 if it only opens one; None if it has none.
        is_constrained: whether the answer follows a grammar, which alone ends it.
        text_until: the mark with which a constrained answer's calls begin. Stop strings and ids still end the free text
            before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        eos_ids: Collection[int],
        thinking: ThinkingTokens | None,
        num_thought: int | None,
        is_constrained: bool = False,
        text_until: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._eos_ids = frozenset(() if params.ignore_eos and not is_constrained else eos_ids)
        self._min_tokens = 0 if is_constrained else params.min_tokens
        stops = not is_constrained or text_until is not None
        self._stop = params.stop if stops else ()
        self._stop_ids = frozenset(params.stop_token_ids if stops else ())
        self._text_until = text_until
        if text_until is not None and (mark := tokenizer.control_ids.get(text_until)) is not None:
            self._stop_ids -= {mark}
        self._thinking = thinking
        self._is_constrained = is_constrained
        self._decoder = StreamDecoder(tokenizer)
        self._forced: deque[int] = deque()
        self._num_thinking_tokens = num_thought or 0
        self._held = ""
        self._at_s: float | None = None
        self._strip_start = num_thought == 0
        self.channel: Channel = "answer" if num_thought is None else "reasoning"
        self.token_ids: list[int] = []
        self.reasoning: str | None = None if num_thought is None else ""
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stopped_by: str | int | None = None
        self.logprobs: list[TokenLogprob] = []
        self._untold: list[TokenLogprob] = []

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end the reply: the model's and the request's."""
        return self._eos_ids | self._stop_ids

    def next_forced(self) -> int | None:
        """The id that must come next instead of a sampled one; None if the model chooses."""
        budget = self._params.thinking_budget
        spent = self.channel == "reasoning" and budget is not None and self._num_thinking_tokens >= budget
        if spent and not self._forced and self._thinking is not None:
            self._forced.extend(self._thinking.closing_ids)
        return self._forced.popleft() if self._forced else None

    def push(self, token_id: int, at_s: float | None = None, logprob: TokenLogprob | None = None) -> list[TextDelta]:
        """Takes the next token and its time; returns the text that it completes.

        Sets `finish_reason` at the reply's end.
        """
        assert self.finish_reason is None, "push after the reply's end"
        self._at_s = at_s
        self.token_ids.append(token_id)
        told = [] if logprob is None else [logprob]
        self.logprobs += told
        if token_id in self.end_ids:
            self.stopped_by = None if token_id in self._eos_ids else token_id
            return self.close("stop")
        self._untold += told
        deltas = self._switch_channel(token_id) if self._is_thinking_token(token_id) else self._take(token_id)
        if self.finish_reason is not None and self._untold:
            deltas.append(self._delta(""))
        if self.finish_reason is None and len(self.token_ids) == self._params.max_tokens:
            deltas += self.close("length")
        return deltas

    def close(self, reason: FinishReason) -> list[TextDelta]:
        """Ends the reply and returns the buffered text. A second call changes nothing."""
        if self.finish_reason is not None:
            return []
        deltas = self._flush_channel()
        if self.finish_reason is None:
            self.finish_reason = reason
        return deltas

    def _is_thinking_token(self, token_id: int) -> bool:
        if self._thinking is None:
            return False
        if self.channel == "reasoning":
            return token_id == self._thinking.end_id
        # A model may open its thinking itself, but only at the very start of its reply.
        return token_id == self._thinking.start_id and not self.text and self.reasoning is None

    def _switch_channel(self, token_id: int) -> list[TextDelta]:
        deltas = self._flush_channel()
        if self._thinking is not None and token_id == self._thinking.start_id:
            self.channel, self.reasoning = "reasoning", ""
        else:
            self.channel = "answer"
            if self._thinking is not None and self._is_constrained and not self._forced:
                # The grammar begins with the answer; the line ends that the model expects come before it.
                self._forced.extend(self._thinking.gap_ids)
        self._strip_start = True
        return deltas

    def _flush_channel(self) -> list[TextDelta]:
        deltas = self._emit(self._decoder.flush())
        held, self._held = self._held, ""
        # Line ends before `</think>` belong to the template, not to the thinking.
        if held and self.channel == "answer":
            deltas.append(self._delta(held))
        if self._untold:
            deltas.append(self._delta(""))
        self._decoder = StreamDecoder(self._tokenizer)
        return deltas

    def _take(self, token_id: int) -> list[TextDelta]:
        if self.channel == "reasoning":
            self._num_thinking_tokens += 1
        return self._emit(self._decoder.push(token_id))

    def _emit(self, text: str) -> list[TextDelta]:
        if self._strip_start:
            text = text.lstrip("\n")
        if not text:
            return []
        self._strip_start = False
        self._held += text
        ready = len(self._held.rstrip("\n")) if self.channel == "reasoning" else self._cut_at_stop_string()
        text, self._held = self._held[:ready], self._held[ready:]
        if self.finish_reason is not None:
            self._held = ""
        return [self._delta(text)] if text else []

    def _cut_at_stop_string(self) -> int:
        """How many buffered characters can be returned; sets `finish_reason` if a stop string is complete."""
        if len(self.token_ids) <= self._min_tokens or not (self._stop or self._text_until):
            return len(self._held)
        mark, end = self._text_until, len(self._held)
        begun = -1 if mark is None else self._held.find(mark)
        pending = 0 if mark is None else _overlap(self._held, mark)
        text_end = begun if begun >= 0 else end - pending
        found = [(at, stop) for stop in self._stop if 0 <= (at := self._held.find(stop)) < text_end]
        if found:
            self.finish_reason = "stop"
            at, self.stopped_by = min(found, key=lambda place: place[0])
            return at
        if begun >= 0:
            self._stop, self._stop_ids, self._text_until = (), frozenset(), None
            return end
        return end - max((pending, *(_overlap(self._held, stop) for stop in self._stop)))

    def _delta(self, text: str) -> TextDelta:
        if self.channel == "reasoning":
            self.reasoning = (self.reasoning or "") + text
        else:
            self.text += text
        told, self._untold = tuple(self._untold), []
        return TextDelta(text, self.channel, len(self.token_ids), self._at_s, told)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
