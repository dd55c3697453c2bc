"""The book's two labs of chapter 4, run through the engine's own ownership code.

`blocks_lab` follows two requests through a pool of eight blocks; `share_lab` forks a prefix and
lets a writer loose on the block that a queued copy still has to read. Token ids stand in for key
and value rows, so a wrong block shows up as a wrong number.

Knows the experiments and how they are printed. Does not know how a block is chosen, shared or
withheld: pool, tables, fork rule, release queue and streams are the engine's. Invariant: each line
states what happened, read off the engine after it happened; with the default arguments the lines
are the book's, byte for byte. The pool is checked for consistency whenever it is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from deepinfer.block_manager import BlockManager, Verdict
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.fork import ForkedTable, split_fork, take_fork_blocks
from deepinfer.observer import KV, Access
from deepinfer.plan import Int32, Rows
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.sequence import SamplingParams, Sequence, SequenceTable, blocks_for

BLOCK_SIZE = 4
NUM_BLOCKS = 8  # of `blocks_lab`, block 0 included
NUM_POSITIONS = (NUM_BLOCKS - 1) * BLOCK_SIZE
MAX_DRAFTS = NUM_POSITIONS - 11  # with 11 tokens they fill the whole pool
MAX_PROCESSED = 3 * BLOCK_SIZE

SHARE_TITLES = {
    "early": "Release the tail pin before the queued copy",
    "deferred": "Release the tail pin after the queued copy",
}

_NUMBER_WORDS = ("no", "one", "two", "three", "four", "five")  # a sixth draft never fits beside B


# -- lab 1: hand out memory in blocks ------------------------------------------------------------


def blocks_lab(num_drafts: int = 2, release_order: str = "reverse") -> Iterator[str]:
    """Lines of the first lab: growing, shrinking and admission in a pool of eight blocks.

    Args:
        num_drafts: positions reserved for drafts when A has 11 tokens, 0 to `MAX_DRAFTS`.
        release_order: how a finished table joins the free list, a name in `FREE_ORDERS`.
    """
    pool = _Pool(release_order)
    pool.admit("A", 6)
    pool.admit("B", 9)
    yield pool.show("admit A(6), B(9)")
    for num_tokens in (8, 9):
        pool.resize("A", num_tokens)
        yield pool.show(f"A reaches {num_tokens} tokens")
    yield from _reserve_drafts(pool, num_drafts)
    yield pool.check_admission(4)
    pool.finish("B")
    yield pool.show("B finishes")
    yield pool.check_admission(4)
    yield pool.check_admission(8)


def _reserve_drafts(pool: _Pool, num_drafts: int) -> Iterator[str]:
    """A reserves room for drafts, which the model rejects; the verified step adds one token."""
    drafts = "draft" if num_drafts == 1 else "drafts"
    missing = pool.resize("A", 11, num_drafts)
    if missing:
        yield pool.show(f"A at 11, {num_drafts} drafts do not fit")
        verdict = pool.blocks.can_allocate(missing).value
        yield f"  {missing} more blocks needed, {pool.blocks.num_free} free: {verdict}"
    else:
        yield pool.show(f"A at 11, {_NUMBER_WORDS[num_drafts]} {drafts} reserved")
    pool.resize("A", 12)
    had_drafts = num_drafts and not missing
    yield pool.show(f"{drafts} rejected; A at 12" if had_drafts else "A reaches 12 tokens")


class _Pool:
    """The engine's pool, tables and release queue, with requests by name.

    Nothing is in flight in this lab, so a release needs no fence and every policy frees at once.
    """

    def __init__(self, release_order: str) -> None:
        self.blocks = BlockManager(NUM_BLOCKS, free_order=release_order)
        self.release = ReleaseQueue(self.blocks, "deferred")
        self.seqs = SequenceTable(2, NUM_POSITIONS, BLOCK_SIZE)
        self.live: dict[str, Sequence] = {}

    def admit(self, name: str, num_tokens: int) -> None:
        """Give a new request the blocks of its prompt."""
        num_blocks = blocks_for(num_tokens, BLOCK_SIZE)
        assert self.blocks.can_allocate(num_blocks) is Verdict.OK
        # Long enough an answer to fill the pool; its last token is never written.
        sampling = SamplingParams(max_tokens=NUM_POSITIONS + 1 - num_tokens)
        seq = Sequence(name, len(self.live), _token_ids(num_tokens), num_tokens, sampling)
        self.seqs.add(seq, self.blocks.allocate(num_blocks))
        self.live[name] = seq

    def resize(self, name: str, num_tokens: int, num_drafts: int = 0) -> int:
        """Bring a table to the length its tokens and drafts need.

        Returns the blocks missing for that; if it is not 0, no draft is reserved and the table is
        as it was.
        """
        row = self.live[name].row
        rows = np.array([row])
        self.seqs.num_tokens[row] = num_tokens
        self.seqs.num_lookahead_slots[row] = num_drafts
        counters = self.seqs.gather(rows)
        change = counters.blocks_needed(BLOCK_SIZE) - counters.num_blocks
        count = int(change[0])
        if count < 0:
            surplus = self.seqs.shrink(row, int(counters.num_blocks[0]) + count)
            self.release.give_up(surplus)
        elif count > 0:
            if not self.release.make_room(count):
                self.seqs.num_lookahead_slots[row] = 0
                return count
            self.seqs.grow(rows, change, self.blocks.allocate(count))
        return 0

    def finish(self, name: str) -> None:
        """End a request; its blocks go back in the release order."""
        self.release.give_up(self.seqs.remove(self.live.pop(name)))

    def check_admission(self, num_blocks: int) -> str:
        """What a request for `num_blocks` blocks would be told now."""
        verdict = self.blocks.can_allocate(num_blocks).value
        return f"admission check for {num_blocks} blocks: {verdict}"

    def show(self, what: str) -> str:
        """`what`, every table, and the free list in the order in which it will be handed out."""
        self.blocks.check_integrity()
        tables = " ".join(
            f"{name}={self.seqs.table(seq.row).tolist()}" for name, seq in self.live.items()
        )
        return f"{what:<31}{tables:<29}free={self.blocks.free_ids()}"


# -- lab 2: two owners, one block ----------------------------------------------------------------


def share_lab(policy: str, num_processed: int = 10, release_order: str = "reverse") -> list[str]:
    """Lines of one run of the second lab: a fork whose tail copy is queued, and a writer.

    The pool is just large enough for the fork, so the writer can only get a block that somebody
    gives back. Its rows arrive on a stream that is not ordered behind the copy, as rows that come
    back from host memory do.

    Args:
        policy: when the fork's pin on the copied tail is released: a key of `SHARE_TITLES`.
        num_processed: tokens of the parent, all of them computed, 1 to `MAX_PROCESSED`.
        release_order: how a table joins the free list. Under any but the book's `reverse` the run
            goes on until the child ends, because only there does the order show.
    """
    lab = _ForkLab(policy, num_processed, release_order)
    lines = [SHARE_TITLES[policy], f"  {lab.fork()}", f"  {lab.finish_parent()}"]
    lines += [f"  {lab.let_writer_in()}", f"  {lab.read_child()}"]
    if release_order != "reverse":
        lines.append(f"  {lab.finish_child()}")
    return lines


class _ForkLab:
    """A parent, its fork, a writer, and the device memory they share.

    Attributes:
        device: runs nothing before it is asked to; its log says what ran, in order.
        rows: int32 [num_blocks * BLOCK_SIZE], the token ids that stand in for KV rows.
    """

    def __init__(self, policy: str, num_processed: int, release_order: str) -> None:
        num_parent_blocks = blocks_for(num_processed, BLOCK_SIZE)
        self.blocks = BlockManager(1 + num_parent_blocks + 1, free_order=release_order)
        self.release = ReleaseQueue(self.blocks, policy)
        self.device = SteppedCpuDevice()
        self.rows = np.zeros(self.blocks.num_blocks * BLOCK_SIZE, np.int32)
        self.num_processed = num_processed
        self.expected = _token_ids(num_processed)
        self.parent = self.blocks.allocate(num_parent_blocks)
        self.rows[_slots(self.parent)[:num_processed]] = self.expected

    def fork(self) -> str:
        """Fork the parent and queue the tail's copy; it has not run."""
        self.blocks.pin(self.parent)
        split = split_fork(self.parent, self.num_processed, BLOCK_SIZE)
        self.child: ForkedTable = take_fork_blocks(self.blocks, split, len(self.parent))
        copy_stream, self.copied = self.device.stream("copy"), self.device.event()
        for source, target in self.child.copies:
            copy_stream.submit(
                partial(self._copy_block, source, target),
                reads=[Access(KV, np.array([source]))],
                writes=[Access(KV, np.array([target]))],
                label=f"copy {source} to {target}",
            )
        copy_stream.record(self.copied)
        parent, child = self.parent.tolist(), self.child.table.tolist()
        owned = sorted({*parent, *child})
        refs = " ".join(f"{block_id}:{self.blocks.ref_count(block_id)}" for block_id in owned)
        return f"fork: parent={parent} child={child} refs {refs} copy={self.child.copies}"

    def finish_parent(self) -> str:
        """End the parent: what the child still owns is not freed.

        The queued copy reads a block of the parent, yet this release needs no fence: the child's
        pin keeps that block from the free list.
        """
        self.release.give_up(self.parent)
        self.blocks.check_integrity()
        shared = [i for i in self.child.table.tolist() if i in self.parent]
        kept = f"shared {shared} kept" if shared else "nothing is shared"
        return f"parent finishes: free={self.blocks.free_ids()}; {kept}"

    def let_writer_in(self) -> str:
        """Release the tail's pin behind the copy; a writer takes the next block and writes it."""
        self.release.give_up(self.child.sources, Fence(step=1, event=self.copied))
        waits = not self.release.make_room(1)
        if waits:
            self.release.release_point()
        if self.copied.query():
            when = " after the copy" if self.child.copies else "; no copy is queued"
        else:
            when = " before the copy runs"
        block_id = self.blocks.allocate_one()
        self.blocks.check_integrity()
        self.device.stream("load").submit(
            partial(self._write_block, block_id),
            writes=[Access(KV, np.array([block_id]))],
            label=f"write {block_id}",
        )
        self.device.advance("load")  # first, because nothing orders it behind the copy
        self.device.synchronize()
        return f"writer {'waits; ' if waits else ''}receives block {block_id}{when}"

    def read_child(self) -> str:
        """Compare what the child reads with what its prefix is."""
        read = self.rows[_slots(self.child.table)[: self.num_processed]]
        correct = bool(np.array_equal(read, self.expected))
        token_ids = read.tolist()
        shown = f"{token_ids[:2]}...{token_ids[-2:]}" if len(token_ids) > 4 else f"{token_ids}"
        return f"child reads {shown}: correct={correct}"

    def finish_child(self) -> str:
        """End the child, the last owner of its blocks."""
        self.release.give_up(self.child.table)
        self.blocks.check_integrity()
        return f"child finishes: free={self.blocks.free_ids()}"

    def _copy_block(self, source: int, target: int) -> None:
        self.rows[_slots([target])] = self.rows[_slots([source])]

    def _write_block(self, block_id: int) -> None:
        self.rows[_slots([block_id])] = np.arange(900, 900 + BLOCK_SIZE)


def _token_ids(num_tokens: int) -> Int32:
    return np.arange(100, 100 + num_tokens, dtype=np.int32)


def _slots(table: Int32 | list[int]) -> Rows:
    """Rows of the blocks of a table, in order: [len(table) * BLOCK_SIZE]."""
    slots: Rows = np.add.outer(np.multiply(table, BLOCK_SIZE), np.arange(BLOCK_SIZE)).ravel()
    return slots
