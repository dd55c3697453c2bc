"""Every pool of ids an engine has, each with its release queue, all of one policy.

    blocks          of KV rows
    state slots     one for each request of a model that has state
    draft slots     one for each request where plans look ahead
    output records  those the caller may read

Makes them and passes on the moments at which a policy may act; what an id means is not known here.
Invariant: no queue misses a release point or a collected step.
"""

from __future__ import annotations

from deepinfer.block_manager import BlockManager
from deepinfer.checks.blocks import observed
from deepinfer.config import EngineConfig
from deepinfer.errors import UserError
from deepinfer.names import KEYED_FREE_ORDERS
from deepinfer.observer import Observer
from deepinfer.prefix_cache import CachingBlockManager
from deepinfer.records import RecordPool
from deepinfer.release import ReleaseQueue
from deepinfer.slots import Slots
from deepinfer.state_slots import StatePool, StateSlots


class Pools:
    """The pools of one engine.

    Args:
        block_manager: the class of the pools of blocks and of state slots.
        states: how many state slots; None for a model without state.
        max_in_flight: steps that may be submitted and not collected.
        observer, state_observer: told of what happens to blocks, and to state slots.

    Attributes:
        blocks, release: the pool of blocks and its queue.
        states, drafts: the slots; None where there are none.
        records: what the caller is told in.
        queues: of all pools, that of the blocks first.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_manager: type[BlockManager],
        states: StatePool | None,
        max_in_flight: int,
        observer: Observer | None = None,
        state_observer: Observer | None = None,
    ) -> None:
        self._config = config
        self.queues: list[ReleaseQueue] = []
        kind = self._kind_of_blocks(block_manager, states)
        self.blocks, self.release = self._make("blocks", config.num_blocks, kind, observer)
        self.states: StateSlots | None = None
        if states is not None:
            made = self._make("state slots", states.num_slots, block_manager, state_observer)
            self.states = StateSlots(*made, states.max_rewind)
        self.drafts: Slots | None = None
        if config.looks_ahead:
            # All may end in each of the steps that a policy withholds: nobody waits for a slot.
            num_slots = 1 + config.max_num_seqs * (2 + max_in_flight)
            made = self._make("draft slots", num_slots)
            self.drafts = Slots(*made, "draft_slot")
        # Between two release points as many results may be collected as steps were in flight.
        records = self._make("output records", max_in_flight + 1)
        self.records = RecordPool(*records, config.max_num_seqs * (1 + config.drafts))

    def _kind_of_blocks(
        self, block_manager: type[BlockManager], states: StatePool | None
    ) -> type[BlockManager]:
        if not self._config.prefix_cache:
            if self._config.free_order in KEYED_FREE_ORDERS:
                raise UserError(
                    f"free_order: {self._config.free_order} looks at what blocks hold",
                    hint="set prefix_cache: true with it",
                )
            return block_manager
        if states is not None and not self._config.store_bytes:
            raise UserError(
                "prefix_cache: the requests of this model have state beside their blocks, and a "
                "hit would lack it",
                hint="keep their states with store_bytes, or leave prefix_cache off",
            )
        if block_manager is not BlockManager:
            raise UserError(f"prefix_cache: {block_manager.__name__} does not find blocks by key")
        return CachingBlockManager

    def _make(
        self,
        things: str,
        size: int,
        block_manager: type[BlockManager] = BlockManager,
        observer: Observer | None = None,
    ) -> tuple[BlockManager, ReleaseQueue]:
        config, free_order = self._config, self._config.free_order
        if free_order in KEYED_FREE_ORDERS and things != "blocks":
            free_order = "reverse"  # they look at keys, and nothing else has any
        pool = block_manager(
            size,
            free_order=free_order,
            discipline=config.discipline,
            seed=config.seed,
        )
        queue = ReleaseQueue(
            observed(pool, observer),
            config.release,
            observer=observer,
            timeout_s=config.timeout_s or None,
            things=things,
        )
        self.queues.append(queue)
        return queue.blocks, queue

    @property
    def num_draft_slots(self) -> int:
        """Draft slots, slot 0 included; 0 where plans do not look ahead."""
        return 0 if self.drafts is None else self.drafts.slots.num_blocks

    # -- moments ---------------------------------------------------------------------------------

    def release_point(self) -> None:
        """The pre-sampler point: forward and sampling of a step are queued."""
        self.records.take_back()
        for queue in self.queues:
            queue.release_point()

    def collected(self, step: int) -> None:
        """The result of `step` has reached the host."""
        for queue in self.queues:
            queue.collected(step)

    def flush(self) -> None:
        """Wait for every fence and free what it kept."""
        for queue in self.queues:
            queue.flush()

    @property
    def any_withheld(self) -> bool:
        """Whether a fence keeps anything."""
        return any(queue.num_entries for queue in self.queues)

    @property
    def wait_ns(self) -> int:
        """How long the policy has made the host wait so far."""
        return sum(queue.counters.wait_ns for queue in self.queues)
