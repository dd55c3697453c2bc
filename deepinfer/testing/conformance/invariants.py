"""The invariants of a block manager, each with what it takes to look at it.

Data only: what is done and what is looked at is `trial`. Invariant: an invariant
tries as little as it needs, so that a manager with one bug fails few of them, by a short example.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARING = ("pin",)
FENCES = ("withhold", "lift")
LEGAL = ("pin", "withhold", "lift")


@dataclass(frozen=True, slots=True)
class Invariant:
    """One property.

    Attributes:
        name: as on the command line and in tables.
        says: what holds, in one sentence.
        number: in the list of invariants of this project; empty for promises.
        reports: public reports of engines that broke it.
        needs: adapter members without which it is not offered.
        tries: besides `allocate` and `release`: `pin`, `withhold` and `lift`, left out where they
            are not offered; the illegal `release_again`, `release_twice`, `pin_free`; and how:
            `fill` (the whole pool is allocated first), `ones` (blocks are released one by one).
        sees: the kinds of finding that break it.
    """

    name: str
    says: str
    number: str
    reports: tuple[str, ...]
    needs: tuple[str, ...]
    tries: tuple[str, ...]
    sees: tuple[str, ...]

    def missing(self, adapter: type) -> list[str]:
        """Members that this adapter would have to have and does not."""
        return [member for member in self.needs if not hasattr(adapter, member)]


INVARIANTS = (
    Invariant(
        "block zero",
        "only ids from 1 to num_blocks - 1 are handed out",
        "I12",
        ("rvllm#32",),
        (),
        LEGAL,
        ("range",),
    ),
    Invariant(
        "one owner",
        "what is handed out has no owner, and no id comes twice",
        "I1",
        ("TensorRT-LLM#12648",),
        (),
        (),
        ("owned",),
    ),
    Invariant(
        "shared block",
        "a block with several owners stays until the last has released it",
        "I2",
        ("apache/tvm#16666", "mini-sglang#52"),
        SHARING,
        ("fill", *SHARING),
        ("owned",),
    ),
    Invariant(
        "owner count",
        "ref_count is the number of owners",
        "I2",
        ("apache/tvm#16666", "vllm#55227"),
        ("ref_count",),
        LEGAL,
        ("owners",),
    ),
    Invariant(
        "free set",
        "the free list has the blocks with neither owner nor fence, and no others",
        "I1",
        ("vllm#45357",),
        ("free_ids",),
        LEGAL,
        ("free set",),
    ),
    Invariant(
        "no duplicate",
        "no block is in the free list twice",
        "I1",
        ("TensorRT-LLM#12648",),
        ("free_ids",),
        LEGAL,
        ("listed",),
    ),
    Invariant(
        "counter",
        "num_free is the length of a walk over the free list",
        "I1",
        ("vllm#42571", "dynamo#13398"),
        ("num_free", "free_ids"),
        LEGAL,
        ("counter",),
    ),
    Invariant(
        "drained pool",
        "when everything has been given back, each block can be handed out once",
        "I4",
        ("TensorRT-LLM#699", "vllm-ascend#10843"),
        (),
        LEGAL,
        ("drained",),
    ),
    Invariant(
        "fence",
        "nothing withheld is handed out before its fence is lifted",
        "I3",
        ("vllm#45357", "vllm-ascend#14055"),
        FENCES,
        ("fill", *FENCES),
        ("withheld",),
    ),
    Invariant(
        "two fences",
        "a shared block that two owners gave up waits for the fences of both",
        "I3",
        ("vllm#45357",),
        (*SHARING, *FENCES),
        ("fill", *LEGAL),
        ("withheld",),
    ),
    Invariant(
        "second release",
        "releasing what nobody owns changes nothing, refused or not",
        "I4",
        ("vllm#42571",),
        (),
        (*LEGAL, "release_again"),
        ("changed", "owned", "drained"),
    ),
    Invariant(
        "named twice",
        "a block named twice in one release is freed once at most",
        "I4",
        ("vllm#42571", "vllm#42612", "dynamo#13398"),
        (),
        (*SHARING, "release_twice"),
        ("raised", "listed", "owned", "drained"),
    ),
    Invariant(
        "pin of a free block",
        "pinning what nobody owns changes nothing, refused or not",
        "I2",
        ("LMCache#1130",),
        SHARING,
        (*LEGAL, "pin_free"),
        ("changed", "drained"),
    ),
    Invariant(
        "refused allocation",
        "an allocation that does not fit changes nothing",
        "I5",
        ("sglang#16067",),
        (),
        LEGAL,
        ("changed", "drained"),
    ),
    Invariant(
        "accepted",
        "no owner's release or pin, and no lift, is refused",
        "I4",
        ("LMCache#1130",),
        (),
        LEGAL,
        ("raised",),
    ),
    Invariant(
        "scattered blocks",
        "what fits is granted in full, wherever the free blocks are",
        "I5",
        ("llama.cpp#3380", "llama.cpp#10873"),
        (),
        (),
        ("ungranted",),
    ),
    Invariant(
        "capacity",
        "NEVER exactly for more than the pool has",
        "I13",
        ("vllm-rbln#957", "vllm#39734"),
        ("can_allocate",),
        LEGAL,
        ("never",),
    ),
    Invariant(
        "one formula",
        "OK exactly for what allocate would grant",
        "I13",
        ("sglang#39271",),
        ("can_allocate",),
        LEGAL,
        ("verdict",),
    ),
    Invariant(
        "discipline",
        "blocks released one by one leave the free list as promised",
        "",
        ("vllm#51482",),
        ("discipline",),
        ("fill", "ones"),
        ("order",),
    ),
    Invariant(
        "free order",
        "the blocks of one table join the free list in the promised order",
        "",
        ("vllm#51482",),
        ("discipline", "free_order"),
        ("fill", "pin"),
        ("order",),
    ),
    Invariant(
        "order behind a fence",
        "they join in the same order when a fence is lifted",
        "",
        ("vllm#45357",),
        ("discipline", "free_order", *FENCES),
        ("fill", *LEGAL),
        ("order",),
    ),
)
