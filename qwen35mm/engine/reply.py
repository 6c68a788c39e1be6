"""An admitted request: its prefill, and then its reply."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from qwen35mm.cache import CachePools, SequenceCache
from qwen35mm.contract import FinishReason, MediaReport, Prefilled, Result, TextDelta, TokenLogprob
from qwen35mm.engine.batches import upload
from qwen35mm.engine.grammar import Grammars, Matcher
from qwen35mm.engine.logprobs import token_logprobs
from qwen35mm.engine.mtp_drafter import Unseen
from qwen35mm.engine.output import OutputProcessor, ThinkingTokens
from qwen35mm.engine.prefill import Prefill
from qwen35mm.engine.request import Request, check_token_ids
from qwen35mm.engine.sampler import Sampler
from qwen35mm.engine.speculation import Draft, Origin, Repeats
from qwen35mm.engine.trust import Experience, Trust
from qwen35mm.model import LoadedModel
from qwen35mm.prompt.calls import OPEN
from qwen35mm.tokenizer import Tokenizer
from qwen35mm_preprocess import MediaPlan


@dataclass(frozen=True)
class StepResult:
    """A step's result for a reply.

    Attributes:
        token_id: the chosen token; None if the reply chooses it.
        logits: [1 + drafts, vocab], valid until the next step runs; None if it already does.
        drafts: the tokens behind the reply's last one in this step; row n + 1 is right if n of them are.
        hidden: [1 + drafts, hidden], the states behind the logits, where the MTP layer drafts; valid as long.
    """

    reply: Reply
    token_id: int | None
    logits: torch.Tensor | None
    drafts: tuple[int, ...] = ()
    hidden: torch.Tensor | None = None


class Reply:
    """An admitted request: its prefill, then its growing reply.

    Args:
        matcher: for the answer's grammar; None if unconstrained.
        tokenizer: gives tokens' texts.
        trust: in its drafts.

    Attributes:
        seed: for its draws.
        last_token_id: the newest token; not in the cache yet.
        ahead: see `schedule.Prompt`.
        table: its row in the sampler's tables; None while it isn't running.
        unseen: what the MTP layer hasn't seen of it, where that drafts.
        drawn_s: seconds of the last step's draws from drafted rows.
    """

    def __init__(
        self,
        request: Request,
        prefill: Prefill,
        seed: int,
        output: OutputProcessor,
        matcher: Matcher | None,
        tokenizer: Tokenizer,
        trust: Trust,
    ) -> None:
        self.request = request
        self.prefill = prefill
        self.seed = seed
        self.output = output
        self.last_token_id: int | None = None
        self.ahead = 0.0
        self.table: int | None = None
        self.trust = trust
        self.unseen = Unseen()
        self.drawn_s = 0.0
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._preempted: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None = None
        self._resumed: SequenceCache | None = None
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._biases: tuple[torch.Tensor, torch.Tensor] | None = None
        self._repeats: Repeats | None = None
        self._num_searched = self._num_drafted = self._num_accepted = 0

    @property
    def cache(self) -> SequenceCache:
        """The sequence; freed while the reply is preempted."""
        return self.prefill.cache if self._resumed is None else self._resumed

    @property
    def tenant(self) -> bytes:
        """Who has sent the prompt, for `Shares`."""
        return self.request.person

    @property
    def left(self) -> float:
        """The prompt's remaining work, for `Shares`."""
        return self.prefill.left

    @property
    def _told_seed(self) -> int | None:
        return None if self.request.params.greedy else self.seed

    @property
    def num_preempted_tokens(self) -> int:
        """A preempted reply's tokens in host memory."""
        return 0 if self._preempted is None else self._preempted[0]["k"].shape[1]

    @property
    def needs_host(self) -> bool:
        """Whether the host must choose the next token, because of a grammar, a thinking budget, `min_tokens` or biases,
        or must read the logits.

        It may change to false, never to true: a step already in flight would then lack the host's choice.
        """
        params = self.request.params
        return (
            self._matcher is not None
            or params.thinking_budget is not None
            or params.logprobs is not None
            or bool(params.logit_bias)
            or self._may_not_end
        )

    @property
    def _may_not_end(self) -> bool:
        return self._matcher is None and len(self.output.token_ids) < self.request.params.min_tokens

    def draft(self, most: int) -> Draft | None:
        """Up to `most` tokens that may follow the newest one: what a grammar or a repetition suggests."""
        self.trust.compare(self.output.token_ids)
        return self._new_draft(most) if most > 0 else None

    def _new_draft(self, most: int) -> Draft | None:
        said = self.output.token_ids
        if self._matcher is not None and self.output.channel == "answer":
            forced = self._matcher.forced()
            if forced:
                return Draft(tuple(forced[:most]), Origin.GRAMMAR, len(said))
        if self._repeats is None:
            self._repeats = Repeats(self.request.prompt.token_ids)
        self._repeats.extend(said[self._num_searched :])
        self._num_searched = len(said)
        found = self._repeats.following(most)
        return None if found is None else Draft(tuple(found[0]), found[1], len(said))

    def take(self, result: StepResult, sampler: Sampler, context_length: int, context_rows: int) -> list[TextDelta]:
        """Takes or chooses the next token, and further ones while drafts are right; returns the text they complete.

        Args:
            context_length, context_rows: most tokens of a sequence, and most rows of its keys and values.
        """
        room = min(context_length, context_rows + self.cache.num_evicted) - len(self.request.prompt.token_ids)
        deltas, accepted, before_s = [], 0, time.monotonic()
        for row, draft in enumerate((*result.drafts, None)):
            logits = None if result.logits is None else result.logits[row]
            deltas += self._take_one(result.token_id, logits, sampler, room)
            if self.last_token_id != draft or self.output.finish_reason is not None:
                break
            accepted += 1
        if result.drafts:
            self.cache.accept(accepted)
        if result.hidden is not None:
            self.unseen.add(self.output.token_ids[-accepted - 1 :], result.hidden[: accepted + 1])
        self.drawn_s = time.monotonic() - before_s if result.drafts else 0.0
        self._num_drafted += len(result.drafts)
        self._num_accepted += accepted
        return deltas

    def _take_one(
        self, token_id: int | None, logits: torch.Tensor | None, sampler: Sampler, room: int
    ) -> list[TextDelta]:
        output = self.output
        self.last_token_id = self._choose(logits, sampler) if token_id is None else token_id
        self._last_token_s = time.monotonic()
        self._first_token_s = self._first_token_s or self._last_token_s
        logprob = None if logits is None else self._logprob(logits, self.last_token_id)
        deltas = output.push(self.last_token_id, self._last_token_s, logprob)
        # The new token needs room in the cache before another can follow.
        if len(output.token_ids) > room:
            deltas += output.close("length")
        return deltas

    def _choose(self, logits: torch.Tensor | None, sampler: Sampler) -> int:
        """The forced next token, or a sampled one."""
        assert logits is not None, "there is neither a token nor logits"
        table, matcher = self.table, self._matcher
        assert table is not None, "only a running reply chooses"
        forced = self.output.next_forced()
        if forced is not None:
            sampler.observe(table, forced)
            return forced
        in_answer = matcher is not None and self.output.channel == "answer"
        allowed = None if matcher is None else matcher.allowed() if in_answer else matcher.while_thinking
        if self._may_not_end:
            allowed = torch.ones(len(logits), dtype=torch.bool) if allowed is None else allowed.clone()
            allowed[list(self.output.end_ids)] = False
        token_id = sampler.sample_one(table, len(self.output.token_ids), self._biased(logits), allowed)
        if matcher is not None and in_answer:
            matcher.accept(token_id)
        return token_id

    def _biased(self, logits: torch.Tensor) -> torch.Tensor:
        params = self.request.params
        if not params.logit_bias:
            return logits
        if self._biases is None:
            biases = dict(params.logit_bias)
            self._biases = (
                upload(np.array(list(biases), dtype=np.int64), logits.device),
                upload(np.array(list(biases.values()), dtype=np.float32), logits.device),
            )
        return logits.index_add(0, *self._biases)

    def _logprob(self, logits: torch.Tensor, token_id: int) -> TokenLogprob | None:
        num_top = self.request.params.logprobs
        if num_top is None:
            return None
        return token_logprobs(logits[None], torch.tensor([token_id]), num_top, self._tokenizer)[0]

    def preempt(self, pools: CachePools) -> None:
        """Preempts the reply: moves its cache to host memory, bit for bit, and frees its place."""
        self._preempted = (self.cache.export(), pools.states.save(self.cache.slot))
        self.cache.free()

    def resume(self, pools: CachePools) -> None:
        """Brings a preempted reply's cache back.

        Raises:
            OutOfSlotsError, OutOfBlocksError: no room yet; nothing has changed.
        """
        assert self._preempted is not None
        kv, states = self._preempted
        cache = pools.new_sequence()
        try:
            cache.append(kv)
            pools.states.load(cache.slot, states)
        except Exception:
            cache.free()
            raise
        cache.rope_delta, cache.num_evicted = self.cache.rope_delta, self.cache.num_evicted
        self._resumed, self._preempted = cache, None

    def prefilled(self) -> Prefilled:
        """The event of the first token."""
        assert self._first_token_s is not None, "there is no token yet"
        return Prefilled(
            num_prompt_tokens=len(self.request.prompt.token_ids),
            ttft_s=self._first_token_s - self.request.arrival_s,
            seed=self._told_seed,
            cache=self.prefill.report(self._first_token_s, 0.0, 0),
        )

    def result(self, finish_reason: FinishReason, pools: CachePools) -> Result:
        """The reply so far."""
        request, output = self.request, self.output
        num_generated = len(output.token_ids)
        ttft_s = decode_tokens_per_s = None
        decode_s = 0.0
        if self._first_token_s is not None and self._last_token_s is not None:
            ttft_s = self._first_token_s - request.arrival_s
            decode_s = self._last_token_s - self._first_token_s
            if decode_s > 0:
                decode_tokens_per_s = (num_generated - 1) / decode_s
        held = len(self.cache.block_table) * pools.kv.block_bytes + pools.states.slot_bytes
        return Result(
            text=output.text,
            reasoning=output.reasoning,
            finish_reason=finish_reason,
            token_ids=tuple(output.token_ids),
            prompt_token_ids=tuple(request.prompt.token_ids.tolist()),
            num_prompt_tokens=len(request.prompt.token_ids),
            num_generated_tokens=num_generated,
            ttft_s=ttft_s,
            decode_tokens_per_s=decode_tokens_per_s,
            seed=self._told_seed,
            media=tuple(media_report(medium.plan) for medium in request.media),
            cache=self.prefill.report(self._first_token_s, decode_s, held),
            stopped_by=output.stopped_by,
            logprobs=None if request.params.logprobs is None else tuple(output.logprobs),
            num_drafted_tokens=self._num_drafted,
            num_accepted_tokens=self._num_accepted,
        )

    def close(self) -> None:
        """Frees everything; a second call does nothing."""
        if self._resumed is not None:
            self._resumed.free()
        self.prefill.close()


class ReplyFactory:
    """Makes replies to one model's requests."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer, self._eos_ids = loaded.tokenizer, loaded.eos_ids
        self._thinking = ThinkingTokens.from_tokenizer(loaded.tokenizer)
        self._vocab_size = loaded.config.text.vocab_size
        self._grammars = Grammars(loaded.vocabulary, vocab_size=loaded.config.text.vocab_size)
        self._experience = Experience()

    def prepared(self, request: Request) -> Request:
        """The request with its matcher. Any thread may call it.

        Raises:
            RequestError: a JSON schema can't be enforced, the reply to continue doesn't fit it, or an unknown token id.
            MissingExtraError: a JSON schema needs a library that isn't installed.
            EngineError: a JSON schema couldn't be checked.
        """
        check_token_ids(request.params, self._vocab_size)
        return request if request.matcher is not None else replace(request, matcher=self._matcher(request))

    def make(self, request: Request, prefill: Prefill) -> Reply:
        """The reply to an admitted request."""
        params = request.params
        output = OutputProcessor(
            self._tokenizer,
            params,
            eos_ids=self._eos_ids,
            thinking=self._thinking if request.finds_thinking else None,
            num_thought=self._num_thought(request) if request.finds_thinking else None,
            is_constrained=request.is_constrained,
            text_until=OPEN if request.calls is not None and not request.params.is_constrained else None,
        )
        seed = secrets.randbits(63) if params.seed is None else params.seed % 2**63
        # A copy, because a requeued reply starts its grammar again.
        matcher = None if request.matcher is None else request.matcher.copy()
        return Reply(request, prefill, seed, output, matcher, self._tokenizer, Trust(self._experience))

    def _matcher(self, request: Request) -> Matcher | None:
        params, so_far = request.params, request.prompt.reply_text
        if request.calls is not None:
            return self._grammars.matcher_of_calls(request.calls, so_far)
        if params.grammar is not None:
            return self._grammars.matcher_of_grammar(params.grammar, so_far)
        return None if params.json_schema is None else self._grammars.matcher(params.json_schema, so_far)

    def _num_thought(self, request: Request) -> int | None:
        """Tokens of the prompt's unfinished thinking, 0 if only line ends; None if it has none."""
        if self._thinking is None:
            return None
        tail = request.prompt.token_ids[request.prompt.tail_start :].tolist()
        for position in range(len(tail) - 1, -1, -1):
            if tail[position] == self._thinking.end_id:
                return None
            if tail[position] == self._thinking.start_id:
                thought = tail[position + 1 :]
                return len(thought) if self._tokenizer.decode(thought).strip("\n") else 0
        return None


def media_report(plan: MediaPlan) -> MediaReport:
    """A prepared medium's report, from its plan."""
    assert plan.digest is not None, "the plan of a prepared medium has its digest"
    grid = plan.grid_thw
    return MediaReport(plan.kind, plan.digest, (grid.t, grid.h, grid.w), plan.num_tokens, plan.timestamps_s)
