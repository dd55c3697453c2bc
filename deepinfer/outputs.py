"""What the engine tells its caller: a step's tokens and times, ended requests, what was decided.

Plain records; nothing here is computed. Invariant: the output of a request owns its arrays, so it
stays as it is whatever the engine does next; that of a step does so once it is cloned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from deepinfer.plan import Float32, Int32
from deepinfer.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request that has ended.

    Attributes:
        prompt_token_ids, token_ids: int32, what it was given and what was sampled for it.
        logprobs: float32 [len(token_ids)], natural log, temperature 1.
        finish_reason: "length", "stop", or what `abort` was told.
        num_preemptions: times its blocks were taken back and its rows recomputed.
    """

    request_id: str
    prompt_token_ids: Int32
    token_ids: Int32
    logprobs: Float32
    finish_reason: str
    num_preemptions: int

    @classmethod
    def of(cls, seq: Sequence, finish_reason: str) -> RequestOutput:
        """The output of a sequence that has left its row."""
        return cls(
            request_id=seq.request_id,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            token_ids=seq.token_ids[seq.num_prompt_tokens :],
            logprobs=seq.logprobs,
            finish_reason=finish_reason,
            num_preemptions=seq.num_preemptions,
        )


class StepMoments(NamedTuple):
    """A step's moments in nanoseconds of the host's monotonic clock, in order; waits included.

    Between `released` and `collecting` the host was its caller's; between `collecting` and
    `arrived` it waited for the result.
    """

    started: int
    planned: int
    submitted: int
    released: int
    collecting: int
    arrived: int
    collected: int
    committed: int


class DraftCounts(NamedTuple):
    """The drafts of a step.

    Attributes:
        num_rows: rows computed for drafts, those among them for which there was none.
        num_seqs: requests that had some.
        proposed, accepted: how many had, and got accepted, a first draft, a second one, and so on.
    """

    num_rows: int
    num_seqs: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step in numbers; times in nanoseconds of the host's monotonic clock.

    Attributes:
        num_tokens, num_seqs: computed in this step.
        num_running, num_waiting: requests with and without a row once it was submitted.
        blocks_free, blocks_held, blocks_withheld: while it was in flight, before the release point.
        slots_held, slots_withheld: state slots, at the same moment; None for a model without state.
        blocks_ahead, blocks_for_drafts: of the held blocks, those for tokens the host did not know
            then; and of these, those that only drafts asked for (`lookahead.BlocksAhead`).
        num_copies: block copies it carried.
        schedule_ns, submit_ns, release_ns, collect_ns, commit_ns: host time, waits excluded.
        wait_ns: host blocked by the release policy.
        result_wait_ns: host blocked until the result was there.
        device_ms: device time of forward and sampling, from events.
        gap_ms: how long the device had nothing to do before it, from events; None where there was
            nothing for it to do.
        drafts: the drafts it verified; None if there were none.
        moments: when each of its phases began and ended.
    """

    step: int
    num_tokens: int
    num_seqs: int
    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_held: int
    blocks_withheld: int
    slots_held: int | None
    slots_withheld: int | None
    blocks_ahead: int
    blocks_for_drafts: int
    num_copies: int
    schedule_ns: int
    submit_ns: int
    release_ns: int
    collect_ns: int
    commit_ns: int
    wait_ns: int
    result_wait_ns: int
    device_ms: float
    gap_ms: float | None
    drafts: DraftCounts | None
    moments: StepMoments

    @property
    def start_ns(self) -> int:
        """When its planning began, on the host's monotonic clock."""
        return self.moments.started

    @property
    def end_ns(self) -> int:
        """When it was committed, on the host's monotonic clock."""
        return self.moments.committed


class StepTokens(Protocol):
    """The tokens of a step.

    Attributes:
        request_ids: of the requests that got a token, once for each.
        token_ids: int32 [len(request_ids)], their tokens.
    """

    @property
    def request_ids(self) -> list[str]: ...

    @property
    def token_ids(self) -> Int32: ...


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """Tokens that stay as they are. Implements `StepTokens`."""

    request_ids: list[str]
    token_ids: Int32


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step produced.

    Its tokens lie in a record that is used again: they can be read until the next release point,
    that is until the next `submit` or `step`, and raise StaleRecordError from then on. `clone()`
    what is to be kept.

    Attributes:
        started_ids: of the requests that got a row with this step (again, after a preemption).
        tokens: of the step.
        finished: requests that ended with this step; their outputs stay.
        stats: the step in numbers.
    """

    started_ids: list[str]
    tokens: StepTokens
    finished: list[RequestOutput]
    stats: StepStats

    @property
    def request_ids(self) -> list[str]:
        """Of the requests that got a token, once for each."""
        return self.tokens.request_ids

    @property
    def token_ids(self) -> Int32:
        """int32 [len(request_ids)], their tokens."""
        return self.tokens.token_ids

    def clone(self) -> StepOutput:
        """The same, with tokens of its own."""
        return replace(self, tokens=OwnTokens(self.request_ids, self.token_ids.copy()))


@dataclass(slots=True)
class SchedulerCounters:
    """Decisions so far.

    Attributes:
        num_later_blocks, num_later_slots: times a request at the head of the queue was told to wait
            for blocks; had its blocks and was told to wait for a state slot.
        num_never: requests refused because they can never fit.
        num_preemptions: times a running request's blocks were taken back.
        num_recomputed_tokens: committed rows thrown away by preemption.
        num_unforked: waiting forks that lost their pins so that others could run.
        num_stateless_forks: forks that compute their prompt themselves, because no state slot was
            free or the state of their parent had gone on too far.
        num_block_copies: blocks copied for forks and copy-on-write.
        num_state_copies: state slots copied for forks.
        num_hit_blocks: blocks that admitted requests took over by what they hold.
        num_blocks_shrunk: blocks given back because drafts were rejected.
        num_held_back: times a running sequence sat out a step, waiting for withheld blocks.
        num_aborted: requests ended by `abort`.
    """

    num_later_blocks: int = 0
    num_later_slots: int = 0
    num_never: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_unforked: int = 0
    num_stateless_forks: int = 0
    num_block_copies: int = 0
    num_state_copies: int = 0
    num_hit_blocks: int = 0
    num_blocks_shrunk: int = 0
    num_held_back: int = 0
    num_aborted: int = 0

    @property
    def num_later(self) -> int:
        """Times the head of the queue was told to wait, for whatever."""
        return self.num_later_blocks + self.num_later_slots
