"""Where the blocks and state slots of a log are in a replay, and what their rows hold.

Rows hold names instead of numbers: a write leaves the name of the block it means, a copy takes the
names along, and a read is right if each row has the name it must have. Knows neither queues nor
policies. Invariant: a block has one place for ever; each row of a place has one name or none.

Rows of one place are bits of an integer, so an access costs the same for 1 row and for 128. A slot
is all one row; its places come behind those of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from deepinfer.observer import KV, STATE, Access
from deepinfer.testing.oplog.operations import Allocate, Copy, Submit, Touched

Rows = list[tuple[int, int, int]]  # place, rows as bits, block


class BlockRows:
    """The rows of `num_blocks` places, none of them written."""

    def __init__(self, num_blocks: int) -> None:
        self._rows: list[dict[int, int]] = [{} for _ in range(num_blocks)]  # name -> its rows

    def write(self, place: int, rows: int, block: int) -> None:
        """Leave the name `block` in `rows`, a set of bits."""
        names = self._rows[place]
        if len(names) > 1 or (names and block not in names):
            for name in list(names):
                names[name] &= ~rows
                if not names[name]:
                    del names[name]
        names[block] = names.get(block, 0) | rows

    def has(self, place: int, rows: int, block: int) -> bool:
        """Whether all of `rows` have the name `block`."""
        return self._rows[place].get(block, 0) & rows == rows

    def names(self, place: int, rows: int) -> list[int]:
        """The names found in `rows`, in no particular order."""
        return [name for name, held in self._rows[place].items() if held & rows]

    def copy(self, pairs: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy whole places: (from, its block, to, its block), all of them read first.

        Rows of the source's block become rows of the target's; a foreign name stays foreign.
        """
        taken = [dict(self._rows[source]) for source, _, _, _ in pairs]
        for names, (_, block, place, new) in zip(taken, pairs, strict=True):
            own = names.pop(block, 0)
            self._rows[place] = names
            if own:
                names[new] = names.get(new, 0) | own


class ReplayMemory:
    """The blocks and state slots of one replay.

    Args:
        num_slots: state slots, slot 0 included; 0: there are none.
        wrong_read: called, inside submitted work, with a sentence for each block of each read whose
            rows do not all hold what they must.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        wrong_read: Callable[[str], None],
        num_slots: int = 0,
    ) -> None:
        self._size, self._wrong_read = block_size, wrong_read
        self._first_slot = num_blocks  # its place
        self._rows = BlockRows(num_blocks + num_slots)
        self._bits: dict[tuple[int, int | None], int] = {}
        self._place = [0]  # of each block, by its number
        self._owner = [""]  # who took it first
        self._begun: set[int] = set()  # slots with a state of their owner's

    def add(self, op: Allocate, places: Sequence[int]) -> None:
        """What an allocation took is at these places of its pool."""
        first = self._first_slot if op.pool else 0
        self._place += [first + place for place in places]
        owners = [owner for owner, _, count in op.takers for _ in range(count)]
        self._owner += owners + [""] * (len(places) - len(owners))

    def are_slots(self, blocks: Sequence[int]) -> bool:
        """Whether these are state slots, of which a table is all or none."""
        return len(blocks) > 0 and self._place[blocks[0]] >= self._first_slot

    def places(self, blocks: Sequence[int]) -> list[int]:
        """Where blocks, or slots, are in their pool."""
        place, first = self._place, self._first_slot if self.are_slots(blocks) else 0
        return [place[block] - first for block in blocks]

    def work(self, op: Submit) -> Callable[[], None]:
        """What the operation does on the device: leave names, then look for those it must find.

        In this order, since a step reads the rows it has itself written. It is the other way round
        with a slot, which a step goes on from; the first one, unless it was copied, finds none.
        """
        reads, writes, rows = self._resolved(op.reads), self._resolved(op.writes), self._rows
        first = self._first_slot
        before = [read for read in reads if read[0] >= first and read[2] in self._begun]
        behind = [read for read in reads if read[0] < first]
        self._begun.update(block for place, _, block in writes if place >= first)

        def look(at: Rows) -> None:
            for place, bits, block in at:
                if not rows.has(place, bits, block):
                    self._complain(op, place, bits, block)

        def run() -> None:
            look(before)
            for place, bits, block in writes:
                rows.write(place, bits, block)
            look(behind)

        return run

    def copying(self, op: Copy) -> Callable[[], None]:
        """What a copy does on the device."""
        sources, places = ([self._place[i] for i in ids] for ids in (op.sources, op.blocks))
        if self.are_slots(op.blocks):
            self._begun.update(op.blocks)
        pairs = list(zip(sources, op.sources, places, op.blocks, strict=True))
        return lambda: self._rows.copy(pairs)

    def accesses(self, touched: Touched) -> list[Access]:
        """What is touched, for whoever watches the device."""
        accesses = [Access(part[0], np.array([part[1]])) for part in touched if len(part) == 2]
        named = [part for part in touched if len(part) == 3]
        slots = [part[0] for part in named if self.are_slots(part[:1])]
        spans = [part for part in named if not self.are_slots(part[:1])] if slots else named
        if slots:
            accesses.append(self.whole(slots))
        if spans:
            places = np.array([self._place[block] for block, _, _ in spans], np.int32)
            starts = np.array([start for _, start, _ in spans], np.int32)
            ends = np.array([end or self._size for _, _, end in spans], np.int32)
            accesses.append(Access(KV, places, starts, ends))
        return accesses

    def whole(self, blocks: Sequence[int]) -> Access:
        """Whole blocks, or slots, for whoever watches the device."""
        kind = STATE if self.are_slots(blocks) else KV
        return Access(kind, np.array(self.places(blocks), np.int32))

    def _resolved(self, touched: Touched) -> Rows:
        resolved, place, bits = [], self._place, self._bits
        for part in touched:
            if len(part) == 3:
                block, start, end = part
                rows = bits.get((start, end))
                if rows is None:
                    rows = bits[start, end] = (1 << (end or self._size)) - (1 << start)
                resolved.append((place[block], rows, block))
        return resolved

    def _complain(self, op: Submit, place: int, bits: int, block: int) -> None:
        found = [self._named(name) for name in self._rows.names(place, bits) if name != block]
        slot = place - self._first_slot
        where = f"block {place}" if slot < 0 else f"state slot {slot}"
        self._wrong_read(
            f"{op.label or 'an operation'} on {op.stream} reads {self._named(block)} in {where} "
            f"and finds {' and '.join(found) or 'rows that nobody wrote'}"
        )

    def _named(self, block: int) -> str:
        owner = self._owner[block]
        return f"a{block} of {owner}" if owner else f"a{block}"
