"""The engine: requests in, events out, one bounded unit of work per `step()`.

It is synchronous, starts no threads and does no input or output: a reader and a writer do that. A step runs at most one
unit of one prompt's work (some vision layers, or a chunk of prefill, on a CPU one layer of it), then decodes one token
of every running reply if that is due. `Shares` chooses the prompt and `Pace` the replies' share; with `prompts_first`
replies wait for prompts. Idle steps compute history commits.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor

import torch

from qwen35mm.cache import CacheSettings, OutOfBlocksError
from qwen35mm.contract import Finished, Progress
from qwen35mm.engine.commits import Commits
from qwen35mm.engine.decoder import Decoder
from qwen35mm.engine.prefill import Prefill
from qwen35mm.engine.reply import Reply, ReplyFactory, StepResult
from qwen35mm.engine.request import CachedPrompt, Request, StepOutput, engine_error
from qwen35mm.engine.runtime import InlineExecutor, Runtime
from qwen35mm.engine.sampler import ids_never_sampled
from qwen35mm.engine.schedule import Pace, Shares
from qwen35mm.engine.settings import EngineSettings, pauses_in_chunks
from qwen35mm.errors import (
    EngineError,
    QueueFullError,
    Qwen35mmError,
    RequestTimeoutError,
)
from qwen35mm.model import LoadedModel
from qwen35mm_preprocess import MediaBudget
from qwen35mm_preprocess.say import say

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests on one loaded model.

    Args:
        loaded: the model with its tokenizer and defaults.
        settings: how much the engine does at once.
        cache: how much the cache keeps.
        reader, writer: read and write files, each in the order of the calls. Without them the step does it itself.
        budget: the most that media may cost, for the memory plan; None takes the default for the model's device.
        clock: seconds, for deadlines; requests must take their times from the same clock.

    Raises:
        ConfigError: a setting can't be used, or memory can't hold one sequence of the context length.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: EngineSettings | None = None,
        cache: CacheSettings | None = None,
        *,
        reader: Executor | None = None,
        writer: Executor | None = None,
        budget: MediaBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loaded = loaded
        self.settings = settings or EngineSettings()
        self.runtime = Runtime(
            loaded,
            self.settings,
            cache or CacheSettings(),
            reader=reader or InlineExecutor(),
            writer=writer or InlineExecutor(),
            budget=budget or MediaBudget.for_device(loaded.model.device.type),
        )
        self._clock = clock
        self._factory = ReplyFactory(loaded)
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Reply] = {}
        # In order of admission.
        self._prefilling: list[Reply] = []
        self._shares = Shares()
        self._pace = Pace() if pauses_in_chunks(loaded.model.device) else None
        invariant = self.settings.batch_invariant
        self._decoder = Decoder(self.runtime, ids_never_sampled(loaded), batch_invariant=invariant)
        self._commits = Commits(self.runtime)

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its reply together."""
        return self.runtime.context_length

    @property
    def has_work(self) -> bool:
        """Whether `step()` would do anything, now or once a file is read."""
        return self.has_unfinished or self._decoder.can_prepare or self.runtime.pieces.can_prepare

    @property
    def has_unfinished(self) -> bool:
        """Whether there are requests, or results of earlier ones that aren't kept yet."""
        runtime = self.runtime
        can_write = runtime.disk is not None and runtime.disk.can_write()
        return self.has_requests or bool(self._commits) or runtime.needs_offload or can_write

    @property
    def has_requests(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self._running or self._waiting)

    @property
    def writing(self) -> bool:
        """Whether the disk's writer still has entries to write."""
        return self.runtime.disk is not None and self.runtime.disk.writing

    @property
    def _decodes_beside_prompts(self) -> bool:
        """Whether running replies get a token though a prompt did some work in this step."""
        return not self.settings.prompts_first and (self._pace is None or self._pace.decodes)

    @property
    def blocked(self) -> bool:
        """Whether all work waits for files to be read."""
        if self._decoder.running or self._decoder.preempted:
            return False
        if any(not reply.prefill.blocked for reply in self._prefilling) or self._next_request() is not None:
            return False
        return bool(self._prefilling) or self._commits.blocked

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def prepared(self, request: Request) -> Request:
        """The request with its grammar compiled, which can take seconds. Any thread may call it, also during a step.

        Raises what `add` raises for schemas and ids.
        """
        return self._factory.prepared(request)

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue.

        Raises:
            ContextTooLongError: the prompt leaves no room for a reply.
            QueueFullError: `max_waiting` requests wait already.
            RequestError: a JSON schema can't be enforced, or the reply to continue doesn't fit it.
            MissingExtraError: a JSON schema needs a library that isn't installed.
            EngineError: a JSON schema couldn't be checked.
        """
        request.check_length(self.context_length)
        if len(self._waiting) >= self.settings.max_waiting:
            raise QueueFullError(
                say("{n} {n|request is|requests are} waiting already. Try again in a moment.", n=len(self._waiting))
            )
        self._waiting[request.id] = self.prepared(request)
        self._commits.supersede(request.conversation)

    def commit(self, source: CachedPrompt) -> None:
        """Computes a finished conversation's segments for its next turn, once the engine has nothing else to do."""
        if self.runtime.reuse and len(source.prompt.token_ids) <= self.context_length:
            self._commits.add(source)

    def cancel(self, request_id: str) -> None:
        """Ends a request in any phase and frees what it holds. Ignores unknown ids: the request may just have ended."""
        if self._waiting.pop(request_id, None) is None and request_id in self._running:
            self._close(self._running[request_id])

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Does one bounded unit of work and returns its events.

        An error ends its request with a Qwen35mmError as the last event. An error in a decode step ends all running
        replies, one while making room for it only the youngest. The engine goes on.
        """
        outputs = self._schedule()
        nobody_decodes = not self._decoder.can_step
        prefilled, did_work = self._run_prompts()
        outputs += prefilled
        if nobody_decodes and self._decoder.can_step and not (self._waiting or self._prefilling):
            return outputs  # return a new reply's first token before computing its second
        if self._decoder.can_step:
            if not did_work or self._decodes_beside_prompts:
                outputs += self._run_decode()
        elif not (self.has_requests or outputs):
            self._run_idle()
        return outputs

    def flush(self) -> None:
        """Ends pending commits, hands the disk's writer everything still to be written, and waits for it."""
        self._commits.clear()
        disk = self.runtime.disk
        if disk is not None:
            disk.flush()

    def explained(self, error: Exception, request_ids: str) -> Qwen35mmError:
        """The error that a person sees; the log has the rest."""
        if isinstance(error, Qwen35mmError):
            # Its traceback's frames would keep the request's memory alive.
            return error.with_traceback(None)
        logger.error("the model failed on %s", request_ids, exc_info=error)
        return engine_error(error, self.runtime.model.device)

    def check_integrity(self) -> None:
        """Asserts that every block, state and pin belongs to a running request, a commit or the cache."""
        starts = [each.prefill.start for each in self._running.values()] + [each.start for each in self._commits.begun]
        begun = [start for start in starts if start is not None]
        caches = [start.sequence for start in begun]
        caches += [reply.cache for reply in self._running.values() if reply.prefill.start is not None]
        self.runtime.prefixes.check_integrity(dict.fromkeys(caches), begun)
        self.runtime.vision.check_integrity()

    def _schedule(self) -> list[StepOutput]:
        """Ends late requests, resumes preempted replies, and admits requests."""
        outputs = self._end_late()
        try:
            self._decoder.resume()
        except Exception as error:
            outputs += self._fail(error, self._decoder.preempted[0])
        if not self._prefilling:
            self.runtime.vision.offload()
        return outputs + self._admit()

    def _end_late(self) -> list[StepOutput]:
        now = self._clock()
        running = [each.request for each in self._running.values()]
        late = [r for r in (*self._waiting.values(), *running) if r.deadline_s is not None and r.deadline_s <= now]
        outputs = []
        for request in late:
            self.cancel(request.id)
            message = say("The time allowed for this request is over. Allow more, or ask for a shorter answer.")
            outputs.append(StepOutput(request.id, RequestTimeoutError(message)))
        return outputs

    def _next_request(self) -> Request | None:
        """The first request in the queue, if it has a slot and room beside running replies and current prompts."""
        if not self._waiting or self._decoder.preempted or len(self._running) >= self.runtime.slots:
            return None
        request = next(iter(self._waiting.values()))
        prompts = [each.prompt for each in (*(reply.request for reply in self._prefilling), request)]
        if self._running and not self._decoder.has_room(*map(self.runtime.kv_keep.all_rows, prompts)):
            return None
        return request

    def _admit(self) -> list[StepOutput]:
        """Takes requests from the queue while there is room."""
        outputs, num_waiting = [], len(self._waiting)
        while (request := self._next_request()) is not None:
            del self._waiting[request.id]
            try:
                reply = self._factory.make(request, Prefill(self.runtime, request, reading=request.reading))
            except Exception as error:
                outputs.append(StepOutput(request.id, self.explained(error, request.id)))
                continue
            self._running[request.id] = reply
            self._prefilling.append(reply)
        total = len(self._waiting)
        if total == num_waiting:
            return outputs
        waiting = enumerate(self._waiting, start=1)
        return outputs + [StepOutput(id_, Progress("wait", ahead, total)) for ahead, id_ in waiting]

    def _run_prompts(self) -> tuple[list[StepOutput], bool]:
        """One unit of the first prompt in turn that has room for it: its events, and whether there was one.

        A prompt that waits for another gives it its turn: else a long one would delay all who wait for it.
        """
        ready = [reply for reply in self._prefilling if not reply.prefill.blocked]
        before_s, stuck = self._clock(), {}
        for in_turn in self._shares.order(self._prefilling, ready):
            reply = self._first_before(in_turn)
            if reply in stuck:
                continue
            if reply.prefill.needs_tower:
                self._commits.leave_tower()
            spent = reply.prefill.spent
            try:
                outputs = self._run_prefill(reply)
            except OutOfBlocksError as error:
                if self._commits.give_way():
                    return [], False
                # Its traceback has this frame, which would keep the prompt's memory alive.
                stuck[reply] = error.with_traceback(None)
                continue
            self._shares.count(in_turn, reply.prefill.spent - spent, ready)
            if self._pace is not None:
                self._pace.prefilled(self._clock() - before_s, ends_chunk=bool(outputs))
            return outputs, True
        return (self._wait_for_room(*next(iter(stuck.items()))) if stuck else []), False

    def _first_before(self, reply: Reply) -> Reply:
        """The prompt to run in this one's turn: itself, unless it waits for a prompt's segments or the vision tower."""
        for other in self._prefilling:
            if other is not reply and reply.prefill.waits_for(other.prefill):
                # It has begun, so it can only wait for the tower.
                return self._first_before(other)
        if reply.prefill.needs_tower:
            return next((other for other in self._prefilling if other.prefill.in_tower), reply)
        return reply

    def _run_prefill(self, reply: Reply) -> list[StepOutput]:
        """Does one unit of a prompt's work; begins its reply after the last one.

        Raises:
            OutOfBlocksError: no room now.
        """
        try:
            outputs = [StepOutput(reply.request.id, progress) for progress in reply.prefill.step()]
            if reply.prefill.done:
                self._prefilling.remove(reply)
                reply.request = reply.request.without_pixels()
                outputs += self._end_prefill(reply)
        except OutOfBlocksError:
            raise  # another prompt may have room
        except torch.OutOfMemoryError as error:
            if reply.prefill.done or not self.runtime.relieve():
                return self._fail(error, reply)
            self._requeue(reply)
            return []
        except Exception as error:
            return self._fail(error, reply)
        return outputs

    def _wait_for_room(self, reply: Reply, error: OutOfBlocksError) -> list[StepOutput]:
        """No prompt finds blocks: waits for replies, unpins a prompt's segments, or requeues a prompt."""
        # Of all prompts before any is requeued: another's may be what this one lacks each time it begins again.
        if self._decoder.running or any(each.prefill.unpin() for each in self._prefilling):
            return []
        rivals = [each for each in self._prefilling if each is reply or each.prefill.start is not None]
        if self._decoder.preempted or len(rivals) > 1:
            self._requeue(reply if self._decoder.preempted else rivals[-1])
            return []
        return self._fail(error, reply)

    def _end_prefill(self, reply: Reply) -> list[StepOutput]:
        """Returns what was read of the prompt, and samples the first token, each if requested."""
        request, read = reply.request, reply.prefill.read()
        outputs = [] if read is None else [StepOutput(request.id, read)]
        if not request.replies:
            self._close(reply)
            return outputs
        return outputs + self._begin_reply(reply)

    def _begin_reply(self, reply: Reply) -> list[StepOutput]:
        assert reply.prefill.last_hidden is not None
        logits = self.runtime.model.logits(reply.prefill.last_hidden)[0].float()
        return self._postprocess(self._decoder.begin(reply, logits))

    def _run_decode(self) -> list[StepOutput]:
        """One token of every running reply."""
        try:
            has_room = self._decoder.make_room(self._commits.give_way)
        except Exception as error:
            # Of the youngest: it is the one that is preempted.
            return self._fail(error, self._decoder.running[-1])
        if not has_room:
            return self._give_way_to(self._decoder.running[0])
        before_s = self._clock()
        try:
            results = self._decoder.step()
        except Exception as error:
            return self._fail(error, *self._decoder.running)
        if self._pace is not None:
            self._pace.decoded(self._clock() - before_s)
        return [output for result in results for output in self._postprocess(result)]

    def _run_idle(self) -> None:
        disk, states = self.runtime.disk, self.runtime.prefixes.states
        if self._decoder.can_prepare:
            self._decoder.prepare()
        elif self._commits:
            self._commits.step()
        elif states.needs_offload:
            states.offload()
        elif disk is not None and disk.can_write():
            disk.write_next()
        elif self.runtime.pieces.can_prepare:
            self.runtime.pieces.prepare()

    def _postprocess(self, result: StepResult) -> list[StepOutput]:
        """The events of a reply's next token, and of its end."""
        reply = result.reply
        request_id = reply.request.id
        if self._running.get(request_id) is not reply:
            return []  # it ended while the device ran a step ahead
        try:
            if result.logits is not None:
                self.runtime.check_numbers(result.logits)
            deltas = reply.take(result, self._decoder.sampler, self.context_length, self.runtime.plan.context_rows)
        except Exception as error:
            return self._fail(error, reply)
        outputs = [StepOutput(request_id, delta) for delta in deltas]
        if len(reply.output.token_ids) == 1:
            outputs.insert(0, StepOutput(request_id, reply.prefilled()))
        if reply.output.finish_reason is not None:
            finished = reply.result(reply.output.finish_reason, self.runtime.pools)
            outputs.append(StepOutput(request_id, Finished(finished)))
            self._close(reply)
        return outputs

    def _give_way_to(self, reply: Reply) -> list[StepOutput]:
        """The only running reply finds no free block: requeues a prompt that holds some."""
        begun = [each for each in self._prefilling if each.prefill.start is not None]
        if begun:
            self._requeue(begun[-1])
            return []
        logger.error("a single reply of %s does not fit; the memory plan is wrong", reply.request.id)
        return self._fail(EngineError(say("The cache is full. Start a new chat, or use a larger cache.")), reply)

    def _requeue(self, reply: Reply) -> None:
        """Frees what a prompt holds and puts it first in the queue; its prefill starts again."""
        self._close(reply)
        self._waiting[reply.request.id] = reply.request
        self._waiting.move_to_end(reply.request.id, last=False)

    def _fail(self, error: Exception, *failed: Reply) -> list[StepOutput]:
        """Ends requests with an error."""
        for reply in failed:
            self._close(reply)
        told = self.explained(error, ", ".join(reply.request.id for reply in failed))
        return [StepOutput(reply.request.id, told) for reply in failed]

    def _close(self, reply: Reply) -> None:
        """Removes a request everywhere and frees what it holds."""
        self._running.pop(reply.request.id, None)
        if reply in self._prefilling:
            self._prefilling.remove(reply)
        self._decoder.remove(reply)
        reply.close()
