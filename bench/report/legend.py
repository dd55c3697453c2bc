"""What the columns of a table mean, in sentences below it.

Knows the columns' keys and how each figure is defined; computes nothing. Invariant: a sentence
stands there only if a column it explains is shown, and an interval is called by the confidence it
has.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench.report.table import Column, Row, Table
from bench.stats import CONFIDENCE, MARGIN, signed_rank_cut
from deepinfer.config import MAX_DRAFTS

# Paragraphs of sentences, each with the columns it explains.
_SENTENCES: tuple[tuple[tuple[tuple[str, ...], str], ...], ...] = (
    (
        (("ttft_ms_p50", "ttft_ms_p99"), "TTFT: arrival to first token, queueing included."),
        (
            ("tpot_ms",),
            "TPOT = (E2E - TTFT) / (n - 1), the median of requests with n >= 2 output tokens.",
        ),
        (("itl_ms_p99",), "ITL: each gap between two tokens."),
        (
            ("itl_delivery_ms_p99",),
            "ITL delivery: each gap between two steps that brought a request tokens; those of one "
            "step have none between them.",
        ),
        (
            ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p99"),
            "Percentiles are nearest-rank, over completed requests.",
        ),
    ),
    (
        (("step_ms_p50",), "step: host time plus waits of one step."),
        (("host_us_per_step",), "host: median without waits."),
        (("wait_us_per_step",), "wait: mean time the host was blocked by the release policy."),
        (
            ("gap_us", "gap_percent"),
            "gap: how long the device had nothing to do between two steps; the median, and the "
            "share of the time of steps and gaps.",
        ),
    ),
    (
        (
            ("acceptance_length",),
            "acceptance length: 1 + accepted drafts by requests with drafts, step by step.",
        ),
        (
            tuple(f"acceptance_{k}" for k in range(1, MAX_DRAFTS + 1)),
            "accept at k: share of the k-th drafts that were accepted.",
        ),
        (
            ("draft_rows_rejected",),
            "rows rejected: rows computed for drafts, there or not, and thrown away.",
        ),
        (
            ("ahead_blocks_peak", "ahead_blocks_mean"),
            "ahead: blocks held for tokens the host did not know yet, while a step was in flight.",
        ),
        (
            ("draft_blocks_peak",),
            "drafts' peak: those of them that only drafts asked for, the most at once.",
        ),
    ),
)
_MEDIANS = {
    "withheld_block_ms": "withheld block-ms",
    "block_copies": "copies",
    "later": "LATER",
    "later_blocks": "LATER",
    "later_slots": "LATER",
    "preemptions": "preemptions",
    "drafts_proposed": "drafts",
    "drafts_accepted": "drafts",
    "draft_rows_rejected": "rows rejected",
    "blocks_shrunk": "blocks shrunk",
    "hit_blocks": "hit blocks",
    "evicted_blocks": "evicted blocks",
    "loads": "loads",
    "loaded_token_percent": "loaded tokens",
    "saved_mib": "saved",
    "loaded_mib": "loaded",
    "transfer_ms": "transfers",
    "transfer_overlap_percent": "beside steps",
    "stateless_forks": "stateless forks",
}
_PEAKS = {
    "withheld_blocks_peak": "withheld peak",
    "held_blocks_peak": "blocks held",
    "held_slots_peak": "slots held",
    "withheld_slots_peak": "slots withheld",
    "nvml_used_mib": "memory",
    "torch_peak_mib": "memory",
    "process_rss_mib": "memory",
}


def build_legend(table: Table, columns: Iterable[Column]) -> tuple[str, ...]:
    """The paragraphs that explain `columns`, those that are shown of `table`."""
    shown = {column.key for column in columns}
    paragraphs = [
        " ".join(text for keys, text in sentences if not shown.isdisjoint(keys))
        for sentences in _SENTENCES
    ]
    counts = [
        _all_are("median of the rounds", _MEDIANS, shown),
        _all_are("largest", _PEAKS, shown),
        "wrong requests: sum of all verified rounds." if "wrong_requests" in shown else "",
        "wrong rows: KV rows read that were another's, sum of all rounds with tagged rows, the "
        "first warm-up among them."
        if "wrong_rows" in shown
        else "",
    ]
    paragraphs.append(" ".join(filter(None, counts)))
    if not shown.isdisjoint(("vs_baseline", "verdict")) and len(table.rows) > 1:
        paragraphs.append(_comparison(table.rows))
    return tuple(filter(None, paragraphs))


def interval_name(rows: Iterable[Row]) -> str:
    """What the ends beside the rows' ratios are; empty if no row has them.

    Too few ratios for the confidence leave only the range of what was seen.
    """
    counts = {row.num_ratios for row in rows if not row.baseline and row.num_ratios > 1}
    few = sorted(n for n in counts if signed_rank_cut(n)[1] < CONFIDENCE)
    numbers = f"{few[0]} to {few[-1]}" if len(few) > 1 else "".join(map(str, few))
    names = [f"{100 * CONFIDENCE:g} % interval"] if len(few) < len(counts) else []
    names += [f"range of the {numbers} ratios"] if few else []
    return ", or ".join(names)


def _all_are(what: str, names: dict[str, str], shown: set[str]) -> str:
    said = ", ".join(dict.fromkeys(name for key, name in names.items() if key in shown))
    return f"{said[0].upper()}{said[1:]}: {what}." if said else ""


def _comparison(rows: Iterable[Row]) -> str:
    name = interval_name(rows)
    ends = f" [{name}]" if name else ""
    text = (
        "vs baseline: tok/s by the baseline's of the same round, the centre of the rounds' "
        f"ratios{ends}."
    )
    if "interval" not in name:
        return text
    return (
        f"{text} SAME: all of the interval within {100 * MARGIN:g} % of 1. "
        "FASTER, SLOWER: all of it above 1, below 1. UNCLEAR: neither."
    )
