"""How much device memory becomes blocks, once everything else has had its share.

The order is that of the engine of the book: load the weights, run the largest step there can be,
then divide what was free at the start:

      free at the start
    - weights
    - peak activation             of the largest step
    - own growth beside torch     contexts, libraries, communication buffers
    - taken by others since       if less is free now than all that explains
    - state slots                 one fixed size per running request
    - state slots, once more      for copies on their way to and from a store
    = for blocks

Numbers in, numbers out: knows no device and measures nothing. Invariant: the lines of a `Sizing`
add up exactly, and what it grants was free at the start and is free now.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.errors import UserError, check_int


def num_state_slots(max_num_seqs: int, chosen: int = 0) -> int:
    """Slots of the pool, slot 0 included, which is never handed out.

    `chosen`, or if that is 0 `floor(1.2 * max_num_seqs) + 1`, in whole numbers.
    """
    check_int("max_num_seqs", max_num_seqs, 1)
    return chosen or max_num_seqs * 6 // 5 + 1


@dataclass(frozen=True, slots=True)
class Reading:
    """Device memory at one moment, in bytes.

    Attributes:
        free: what anybody could still allocate.
        own: what this process holds, by the driver.
        torch: what torch's allocator holds of that, its unused cache included.
        torch_unused: that cache.
    """

    free: int
    own: int
    torch: int
    torch_unused: int

    @property
    def available(self) -> int:
        """What this process could use: free memory and torch's cache."""
        return self.free + self.torch_unused


@dataclass(frozen=True, slots=True)
class Needs:
    """What the model takes and what a block and a slot cost, in bytes.

    Attributes:
        weights: held from loading on.
        peak_activation: most that the largest step held beside the weights.
        num_slots: state slots, slot 0 included; 0 for a model without state.
        bytes_per_slot: of each.
        bytes_per_block: of each block over all layers.
    """

    weights: int
    peak_activation: int
    num_slots: int
    bytes_per_slot: int
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class Sizing:
    """The number of blocks, and where every byte went.

    Attributes:
        num_blocks: in the pool, block 0 included.
        lines: the first is what there was, the others what was taken off it (negative); their sum
            is what the blocks got.
        bytes_for_blocks: that sum; at least `num_blocks` blocks, and less than one more.
    """

    num_blocks: int
    lines: tuple[tuple[str, int], ...]
    bytes_for_blocks: int


def own_growth(start: Reading, now: Reading) -> int:
    """Bytes this process took since `start` that are not torch's; other processes do not count."""
    return max((now.own - now.torch) - (start.own - start.torch), 0)


def size_pool(start: Reading, now: Reading, needs: Needs) -> Sizing:
    """Divide the memory that was free at `start`.

    Args:
        start: before the weights were loaded.
        now: after the largest step; its activations are given back, or in torch's cache.
        needs: of the model.

    Raises:
        UserError: not even one block can be handed out; says what is left and what that needs.
    """
    growth = own_growth(start, now)
    # Without anybody else, this much is there now: more is somebody else's gift and not counted on.
    expected = start.available - needs.weights - growth
    state = needs.num_slots * needs.bytes_per_slot
    slots = ((f"{needs.num_slots} state slots", -state), ("state slots, once more", -state))
    lines = (
        ("free at the start", start.available),
        ("weights", -needs.weights),
        ("peak activation", -needs.peak_activation),
        ("own growth beside torch", -growth),
        ("taken by others since", min(now.available - expected, 0)),
        *(slots if needs.num_slots else ()),
    )
    left = sum(num_bytes for _, num_bytes in lines)
    num_blocks = left // needs.bytes_per_block
    if num_blocks < 2:
        raise UserError(
            f"too little memory: {left} bytes are left for blocks, {2 * needs.bytes_per_block} are "
            "needed for one block and block 0",
            hint=_remedy(lines),
        )
    return Sizing(num_blocks, lines, left)


def _remedy(lines: tuple[tuple[str, int], ...]) -> str:
    """The line that takes the most, which to look at first."""
    name, num_bytes = min(lines, key=lambda line: line[1])
    return f"of {lines[0][1]} bytes, {name} take {-num_bytes}"
