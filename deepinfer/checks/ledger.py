"""The checkers' own books: owners, fences, names and epochs of every block, or state slot.

Written up from what an observer is told and from nothing else, so they can be held against the
block manager's. Knows no rule: what a contradiction means is for the checkers built on it. An
epoch of a block is one ownership, from being handed out to being handed out again.

Invariant: the books follow what was told even where it makes no sense (counts stop at 0, ids that
are no block are left out), so one fault does not make a hundred more look like one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.checks.host import Host
from deepinfer.observer import NO_STEP, BlockIds, Observer

Index = NDArray[np.intp]  # block ids as numpy indexes best


@dataclass(slots=True)
class Release:
    """How a table was given up: by whom, why, behind the fence of which step, and kept for it?"""

    owner: str
    path: str
    step: int | None
    fenced: bool = False

    def __str__(self) -> str:
        how = f"given up by {self.owner!r} ({self.path})"
        if self.step is None:
            return f"{how} with nothing in flight"
        fence = f"step {self.step}" if self.step != NO_STEP else "a fence of no step"
        return f"{how} behind {fence}, {'' if self.fenced else 'not '}withheld for it"


class OwnerNames:
    """Which named owner holds which block: bool [owner, block].

    One byte for each pair, so that thousands of pairs are looked up in one numpy call.

    Attributes:
        counts: int32 [num_blocks], named owners of each block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.counts = np.zeros(num_blocks, np.int32)
        self._holds = np.zeros((17, num_blocks), bool)  # the last one is nobody, and holds nothing
        self._slots: dict[str, int] = {}
        self._free = list(range(15, -1, -1))

    def add(self, owner: str, ids: Index) -> None:
        """`owner` holds `ids` from now on."""
        slot = self._slots.get(owner)
        if slot is None:
            slot = self._slots[owner] = self._new_slot()
        holds = self._holds[slot]
        new = np.unique(ids[~holds[ids]])
        holds[new] = True
        self.counts[new] += 1

    def drop(self, owner: str, ids: Index) -> None:
        """`owner` holds `ids` no longer."""
        slot = self._slots.get(owner)
        if slot is None:
            return
        holds = self._holds[slot]
        held = np.unique(ids[holds[ids]])
        holds[held] = False
        self.counts[held] -= 1
        if not holds.any():
            self._free.append(self._slots.pop(owner))

    def forget(self, ids: Index) -> None:
        """Nobody holds `ids` any more."""
        if self.counts[ids].any():
            self._holds[:, ids] = False
            self.counts[ids] = 0

    def slot(self, owner: str | None) -> int:
        """The number of an owner for `hold`; -1, which holds nothing, if it holds nothing."""
        return self._slots.get(owner, -1) if owner is not None else -1

    def hold(self, slots: Index, ids: Index) -> NDArray[np.bool_]:
        """Whether `slots[i]` holds `ids[i]`, bool [n]."""
        return self._holds[slots, ids]

    def of(self, ids: Index) -> dict[int, str]:
        """All named owners of each block that has any, as text."""
        names = {slot: owner for owner, slot in self._slots.items()}
        columns, slots = self._holds[:, ids].T.nonzero()
        found: dict[int, str] = {}
        for block_id, slot in zip(ids[columns].tolist(), slots.tolist(), strict=True):
            name = repr(names[slot])
            found[block_id] = f"{found[block_id]} and {name}" if block_id in found else name
        return found

    def _new_slot(self) -> int:
        if not self._free:
            size = len(self._holds) - 1
            grown = np.zeros((2 * size + 1, self._holds.shape[1]), bool)
            grown[:size] = self._holds[:size]
            self._holds = grown
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()


class Ledger(Observer):
    """The books of one pool; of use once `bind` was called, before the first block moves.

    Attributes:
        refs, fences: int32 [num_blocks], owners and fences of each block.
        epochs: int32 [num_blocks], how often each block was handed out.
        names: the owners that gave a name.
        releases: object [num_blocks], the last `Release` of each block, or None.
        let_go: the same, of the epoch before: how the block came to be free for its owner of now.
    """

    def bind(self, host: Host) -> None:
        """Whose requests and blocks these are."""
        self.host = host
        self.open(host.config.num_blocks)

    def open(self, num_blocks: int) -> None:
        """Begin books of a pool in which nothing is owned."""
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks, np.int32)
        self.fences = np.zeros(num_blocks, np.int32)
        self.epochs = np.zeros(num_blocks, np.int32)
        self.names = OwnerNames(num_blocks)
        self.releases = np.full(num_blocks, None, object)
        self.let_go = np.full(num_blocks, None, object)
        self._giving_up: Release | None = None

    def usable(self, ids: BlockIds) -> Index:
        """Those of `ids` that are blocks one can own, intp [n]."""
        index = np.asarray(ids, np.intp)
        inside = (index > 0) & (index < self.num_blocks)
        return index if inside.all() else index[inside]

    def allocated(self, ids: BlockIds) -> None:
        """A new epoch of each block."""
        index = self.usable(ids)
        self.refs[index] = 1
        self.epochs[index] += 1
        self.names.forget(index)
        self.let_go[index] = self.releases[index]

    def pinned(self, ids: BlockIds) -> None:
        """One more owner."""
        np.add.at(self.refs, self.usable(ids), 1)

    def hit(self, ids: BlockIds) -> None:
        """One more owner, of whatever state; the epoch goes on, for the rows do."""
        np.add.at(self.refs, self.usable(ids), 1)

    def released(self, table: BlockIds, ids: BlockIds, fenced: bool) -> None:
        """One owner less, and with `fenced` one fence more."""
        index = self.usable(ids)
        np.subtract.at(self.refs, index, 1)
        self.refs[index] = np.maximum(self.refs[index], 0)
        if fenced:
            np.add.at(self.fences, index, 1)
        release, self._giving_up = self._giving_up, None
        if release is None:  # not through the release queue
            release = self.releases[index] = Release("somebody", "released directly", None)
        release.fenced = fenced

    def lifted(self, ids: BlockIds) -> None:
        """One fence less."""
        index = self.usable(ids)
        np.subtract.at(self.fences, index, 1)
        self.fences[index] = np.maximum(self.fences[index], 0)

    def took(self, owner: str, ids: BlockIds, path: str) -> None:
        """The owner has a name."""
        self.names.add(owner, self.usable(ids))

    def forked(self, owner: str, parent: str, ids: BlockIds) -> None:
        """The new owner has a name."""
        self.names.add(owner, self.usable(ids))

    def giving_up(
        self,
        table: BlockIds,
        step: int | None,
        owner: str,
        path: str,
        event: object | None = None,
    ) -> None:
        """Remember who and why."""
        index = self.usable(table)
        self._giving_up = Release(owner, path, step)
        self.releases[index] = self._giving_up
        self.names.drop(owner, index)
