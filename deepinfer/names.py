"""The names a user may choose from, each with one line on what it does.

Knows no implementation: the modules that own a choice map these names to code, and the toolkit
checks input against them without loading that code. Invariant: the tuples are exactly the keys of
`DESCRIPTIONS`, in the order in which help and listings show them.
"""

from __future__ import annotations

DESCRIPTIONS: dict[str, dict[str, str]] = {
    "release": {
        "early": "at once, nothing waited for",
        "blocking": "after the host has waited right behind the submit",
        "deferred": "after the host has waited at the end of the submit, with the step queued",
        "polled": "when a look at the event finds it passed; the host never waits",
        "step": "when the result of the step that carried it is collected; no event of its own",
        "ordered": "at once, tagged: the stream of the next writer waits for the event",
    },
    "free_order": {
        "reverse": "last block of the table first",
        "forward": "first block of the table first",
        "by_id": "smallest block id first",
        "shuffled": "random, drawn from the seed",
    },
    "discipline": {
        "fifo": "blocks join at the back and leave at the front",
        "lifo": "blocks join and leave at the front",
        "by_id": "the smallest free block id leaves first",
    },
    "fence": {
        "step": "one event for all blocks that a step withholds",
        "block": "one event per withheld block",
    },
    "admission": {
        "prompt": "reserves the blocks of the tokens there are",
        "lifetime": "reserves the blocks of the longest the request may become",
    },
    "preemption": {
        "newest": "the request admitted last gives way",
        "most_blocks": "the request that holds most blocks gives way",
    },
    "fork_copy": {
        "last": "the block with the last computed row is copied even if it is full",
        "partial": "the last block is copied only if rows will be written into it",
    },
    "drafter": {
        "ngram": "what followed the last few tokens where they stood before (prompt lookup)",
        "mtp": "what the model's own draft layers make of its last hidden state",
        "replay": "a reference run's tokens, wrong as often as the workload asks",
    },
    "overlap": {
        "off": "a step is planned when the result of the last one is known",
        "on": "a step is planned while the last one runs",
        "2": "two steps are planned ahead",
    },
    "load_stream": {
        "load": "a stream of its own, behind nothing but the fences of the blocks it fills",
        "compute": "the stream of the forward passes, behind all that was queued there",
    },
    "checks": {
        "off": "nothing is checked while the engine runs",
        "tags": "each KV row a step reads carries the tag of the tokens that belong there",
        "order": "accesses of one block by two operations are ordered by streams, events and waits",
        "conservation": "owners, fences and free blocks add up, and tables cover what is written",
    },
    "device": {
        "cpu": "torch on the CPU, a worker thread per stream",
        "cpu-stepped": "torch on the CPU without threads: deterministic, runs when waited for",
        "cuda": "an NVIDIA GPU",
    },
}

# Of a pool that finds blocks by what they hold, beside the above. A plain pool refuses them: to it
# all blocks are without a key, which leaves `reverse` at the tail or, by another name, `lifo`.
KEYED_FREE_ORDERS: dict[str, str] = {
    "reverse_unhashed_first": "blocks without a key first, then the others; each last block first",
    "reverse_unhashed_head": "last block first; one without a key is handed out before all others",
    "never_hit_first": "last block first; one never hit is handed out before all that were",
}

TITLES: dict[str, str] = {
    "release": "release policy: when a given-up block may be handed out again",
    "free_order": "free order: how one table's blocks join the free list",
    "discipline": "free-list discipline: where blocks join and leave",
    "fence": "fence: what withheld blocks wait for",
    "admission": "admission: what a request reserves before it runs",
    "preemption": "preemption: which running request gives its blocks back",
    "fork_copy": "fork copy: what a fork does with the parent's last block",
    "drafter": "drafter: where the tokens come from that a step verifies",
    "overlap": "overlap: how far planning runs ahead of the device",
    "load_stream": "load stream: where rows kept in a store come back",
    "checks": "checks: what watches the engine while it runs (several joined by +)",
    "device": "device",
}


def names_of(kind: str) -> dict[str, str]:
    """All names of a kind with what they do, those that only some pools take among them."""
    return DESCRIPTIONS[kind] | (KEYED_FREE_ORDERS if kind == "free_order" else {})


RELEASE_POLICIES = tuple(DESCRIPTIONS["release"])
UNSAFE_POLICIES = frozenset({"early"})
FREE_ORDERS = tuple(DESCRIPTIONS["free_order"])
DISCIPLINES = tuple(DESCRIPTIONS["discipline"])
FENCES = tuple(DESCRIPTIONS["fence"])
ADMISSIONS = tuple(DESCRIPTIONS["admission"])
PREEMPTIONS = tuple(DESCRIPTIONS["preemption"])
FORK_COPIES = tuple(DESCRIPTIONS["fork_copy"])
DRAFTERS = tuple(DESCRIPTIONS["drafter"])
CHECKS = tuple(name for name in DESCRIPTIONS["checks"] if name != "off")
OVERLAPS = tuple(DESCRIPTIONS["overlap"])  # by the number of steps planned ahead
LOAD_STREAMS = tuple(DESCRIPTIONS["load_stream"])
DEVICES = tuple(DESCRIPTIONS["device"])
