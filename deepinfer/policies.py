"""Admission and preemption: how much a request reserves when it starts, and who gives way.

Both are plug-ins: functions in a table by name. They see numbers only and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepinfer.plan import Rows
from deepinfer.sequence import SequenceTable, blocks_for

Reservation = Callable[[int, int, int], int]
VictimChoice = Callable[[SequenceTable, Rows], int]


def lifetime_blocks(num_tokens: int, max_total_tokens: int, block_size: int) -> int:
    """Blocks of the longest a request may become.

    The last token it samples is never written to the cache, so it needs no position. This is also
    the number a request must fit with to be accepted at all: validator and allocator share it.
    """
    return blocks_for(max(num_tokens, max_total_tokens - 1), block_size)


def prompt_blocks(num_tokens: int, max_total_tokens: int, block_size: int) -> int:
    """Blocks of the tokens there are: the whole prompt, at its first chunk."""
    return blocks_for(num_tokens, block_size)


def newest(seqs: SequenceTable, running: Rows) -> int:
    """The row that was admitted last."""
    return int(running[-1])


def most_blocks(seqs: SequenceTable, running: Rows) -> int:
    """The row with the most blocks; of equals, the one admitted last."""
    held = seqs.num_blocks[running][::-1]
    return int(running[len(running) - 1 - int(np.argmax(held))])


ADMISSION: dict[str, Reservation] = {"prompt": prompt_blocks, "lifetime": lifetime_blocks}
PREEMPTION: dict[str, VictimChoice] = {"newest": newest, "most_blocks": most_blocks}
