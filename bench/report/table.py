"""Samples -> the comparison table: columns, rows, notes. What it says, not how it looks.

Knows the metrics and what a reader must be told about a run; knows no output format. Invariant: a
pure function of the samples, so exporting a results file again gives the same table. A value that
is undefined, or is not finite, is None and its reason stands in the row's `undefined`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from bench.metrics import CellMetrics, compute_metrics
from bench.report.notes import build_notes
from bench.samples import CellRecord, RunRecord, Samples
from bench.stats import Judgement
from bench.step_metrics import Metric
from bench.verdicts import judge_cells

Kind = Literal["axis", "number", "count", "small", "ratio", "bound", "word", "detail"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `key` names it in JSON and CSV; `header` on paper, its lines split by `\\n`.

    `kind` says what its values are: `axis` a setting, `number` a measured figure, `count` a whole
    number, `small` a figure near 0 shown with its power of ten, `ratio` a quotient, `bound` an end
    of the interval of the ratio to its left, with which it is shown, `word` what the ratio says,
    `detail` what is in files and on request only.
    """

    key: str
    header: str
    kind: Kind

    @property
    def title(self) -> str:
        """The header on one line."""
        return self.header.replace("\n", " ")


METRIC_COLUMNS = (
    Column("tok_per_s", "tok/s", "number"),
    Column("ttft_ms_p50", "TTFT p50\nms", "number"),
    Column("ttft_ms_p99", "TTFT p99\nms", "number"),
    Column("tpot_ms", "TPOT\nms", "number"),
    Column("itl_ms_p99", "ITL p99\nms", "number"),
    Column("step_ms_p50", "step p50\nms", "number"),
    Column("host_us_per_step", "host\nus/step", "number"),
    Column("wait_us_per_step", "wait\nus/step", "number"),
    Column("withheld_blocks_peak", "withheld\npeak", "count"),
    Column("withheld_block_ms", "withheld\nblock-ms", "number"),
    Column("block_copies", "block\ncopies", "count"),
    Column("later", "LATER", "count"),
    Column("preemptions", "preemptions", "count"),
    Column("wrong_requests", "wrong\nrequests", "count"),
    Column("max_logprob_diff", "max dlogp\nnats", "small"),
    Column("wrong_rows", "wrong\nrows", "count"),
    Column("hazards", "hazards", "detail"),
    Column("contradictions", "contradictions", "detail"),
    Column("vs_baseline", "vs baseline", "ratio"),
    Column("vs_baseline_low", "vs baseline low", "bound"),
    Column("vs_baseline_high", "vs baseline high", "bound"),
    Column("verdict", "verdict", "word"),
    Column("verdict_reason", "verdict reason", "detail"),
    Column("detectable_percent", "detectable\n%", "detail"),
    Column("nvml_used_mib", "NVML used\nMiB", "number"),
    Column("torch_peak_mib", "torch peak\nMiB", "number"),
    Column("process_rss_mib", "RSS\nMiB", "number"),
)
_HELD_BLOCKS = Column("held_blocks_peak", "blocks\nheld peak", "count")
# Blocks and state slots apart, of models that have both; beside the columns above.
SLOT_COLUMNS = (
    _HELD_BLOCKS,
    Column("held_slots_peak", "slots\nheld peak", "count"),
    Column("withheld_slots_peak", "slots\nwithheld peak", "count"),
    Column("later_blocks", "LATER\nblocks", "count"),
    Column("later_slots", "LATER\nslots", "count"),
    Column("stateless_forks", "stateless\nforks", "count"),
)
# Where some cell finds blocks by what they hold.
REUSE_COLUMNS = (
    Column("hit_blocks", "hit\nblocks", "count"),
    Column("evicted_blocks", "evicted\nblocks", "count"),
)
# Where some cell keeps rows in a store.
STORE_COLUMNS = (
    Column("loads", "loads", "count"),
    Column("loaded_token_percent", "loaded\ntokens %", "number"),
    Column("saved_mib", "saved\nMiB", "number"),
    Column("loaded_mib", "loaded\nMiB", "number"),
    Column("transfer_ms", "transfers\nms", "number"),
    Column("transfer_overlap_percent", "beside\nsteps %", "number"),
)
# Where some cell plans ahead (`overlap`, drafts): what that is for, and what it holds.
GAP_COLUMNS = (Column("gap_us", "gap\nus", "number"), Column("gap_percent", "gap\n%", "number"))
AHEAD_COLUMNS = (
    _HELD_BLOCKS,
    Column("ahead_blocks_peak", "ahead\npeak", "count"),
    Column("ahead_blocks_mean", "ahead\nmean", "number"),
)
# Where some cell has drafts; `acceptance_K` for as many positions as there are.
DRAFT_COLUMNS = (
    Column("itl_delivery_ms_p99", "ITL p99\ndelivery ms", "number"),
    Column("drafts_proposed", "drafts\nproposed", "count"),
    Column("drafts_accepted", "drafts\naccepted", "count"),
    Column("acceptance_length", "acceptance\nlength", "number"),
)
DRAFT_BLOCK_COLUMNS = (
    Column("draft_blocks_peak", "drafts'\npeak", "count"),
    Column("blocks_shrunk", "blocks\nshrunk", "count"),
    Column("draft_rows_rejected", "rows\nrejected", "count"),
)
FIRST_AXES = ("release", "free_order")


@dataclass(frozen=True, slots=True)
class Row:
    """One cell's figures: `values` has every column's key, `undefined` the reasons of the Nones.

    `num_ratios` counts the rounds it has in common with the baseline; `num_findings` what its
    checkers found. `unsafe` by its release policy, or because they found something.
    """

    cell: int
    values: dict[str, Any]
    undefined: dict[str, str]
    unsafe: bool
    baseline: bool
    all_failed: bool = False
    num_ratios: int = 0
    num_findings: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """What a reader wants to see of a table; see `bench.report.view`.

    Attributes:
        columns: keys, in the order to show them; empty for the format's own choice.
        sort: keys, `-` before one for descending.
        group_by: an axis whose values get a table each; empty for one table.
        precision: significant figures of what is measured; None for the format's own choice.
    """

    columns: tuple[str, ...] = ()
    sort: tuple[str, ...] = ()
    group_by: str = ""
    precision: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """All that is printed of a run: `columns` of `rows`, as `view` wants them.

    A row's `values` may have more keys than there are columns; formats show the columns only.
    """

    samples: Samples
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    view: View = View()

    @property
    def run(self) -> RunRecord:
        """What was run."""
        return self.samples.run

    @property
    def footnotes(self) -> tuple[str, ...]:
        """Each reason for an undefined value once, in the order of rows and columns."""
        keys = {column.key for column in self.columns}
        reasons = (
            reason for row in self.rows for key, reason in row.undefined.items() if key in keys
        )
        return tuple(dict.fromkeys(reasons))

    @property
    def num_wrong_requests(self) -> int:
        """Wrong requests over all rows; unverified rows have none to count."""
        return sum(int(row.values["wrong_requests"] or 0) for row in self.rows)

    @property
    def num_findings(self) -> int:
        """What the checkers found, over all rows."""
        return sum(row.num_findings for row in self.rows)

    @property
    def nothing_completed(self) -> bool:
        """Whether some cell completed not one request: it has no result, whatever its times say."""
        return any(row.all_failed for row in self.rows)


def build_table(samples: Samples) -> Table:
    """The table of a results file, a row per cell in the order of the file."""
    metrics = compute_metrics(samples)
    judgements = judge_cells(metrics)
    axes, figures = _axis_columns(samples), _metric_columns(samples)
    return Table(
        samples=samples,
        columns=(*axes, *figures),
        rows=tuple(
            _row(m, axes, figures, judged) for m, judged in zip(metrics, judgements, strict=True)
        ),
        notes=build_notes(samples, metrics, judgements),
    )


def _axis_columns(samples: Samples) -> tuple[Column, ...]:
    """`release` and `free_order` first, then the others in the order the file names them."""
    named = [*samples.run.axes, *(name for cell in samples.cells for name in cell.axes)]
    used = {name for cell in samples.cells for name in cell.axes}
    names = [name for name in dict.fromkeys([*FIRST_AXES, *named]) if name in used]
    return tuple(Column(name, name.replace("_", "\n", 1), "axis") for name in names)


def _metric_columns(samples: Samples) -> tuple[Column, ...]:
    """All figures there are; those of slots, look-ahead and drafts where some cell has these."""
    engines = [_engine_settings(samples, cell) for cell in samples.cells]
    num_drafts = max((engine.get("drafts", 0) for engine in engines), default=0)
    ahead = num_drafts or any(engine.get("overlap", "off") != "off" for engine in engines)
    rates = tuple(
        Column(f"acceptance_{k}", f"accept\nat {k}", "number") for k in range(1, num_drafts + 1)
    )
    has_slots = any("num_state_slots" in r.counters for r in samples.rounds)
    behind = {
        "itl_ms_p99": (*DRAFT_COLUMNS, *rates) if num_drafts else (),
        "wait_us_per_step": GAP_COLUMNS if ahead else (),
        "withheld_block_ms": (
            *(AHEAD_COLUMNS if ahead else ()),
            *(DRAFT_BLOCK_COLUMNS if num_drafts else ()),
        ),
        "later": SLOT_COLUMNS if has_slots else (),
        "block_copies": (
            *(REUSE_COLUMNS if any(e.get("prefix_cache") for e in engines) else ()),
            *(STORE_COLUMNS if any(e.get("store_bytes") for e in engines) else ()),
        ),
    }
    columns = (
        shown for column in METRIC_COLUMNS for shown in (column, *behind.get(column.key, ()))
    )
    return tuple(dict.fromkeys(columns))


def _engine_settings(samples: Samples, cell: CellRecord) -> dict[str, Any]:
    """The engine's settings in one cell, as far as the file has them."""
    shared = samples.run.config.get("engine", {})
    return {**shared, **cell.axes}


def _row(
    cell: CellMetrics,
    axes: tuple[Column, ...],
    figures: tuple[Column, ...],
    judged: Judgement,
) -> Row:
    values: dict[str, Any] = {column.key: cell.cell.axes.get(column.key) for column in axes}
    undefined: dict[str, str] = {}
    compared = _ratio_metrics(judged)
    values["verdict"] = judged.verdict.value if judged.verdict else judged.why.value
    values["verdict_reason"] = judged.why.value
    for column in figures:
        if column.key in values:
            continue
        metric = compared.get(column.key) or getattr(cell, column.key)
        value, reason = metric.value, metric.reason
        if value is not None and not math.isfinite(value):
            value, reason = None, "not a finite number"
        elif value is not None and float(value).is_integer() and column.kind == "count":
            value = int(value)
        values[column.key] = value
        if value is None:
            undefined[column.key] = reason
    return Row(
        cell.cell.cell,
        values,
        undefined,
        unsafe=cell.cell.unsafe or cell.num_findings > 0,
        num_findings=cell.num_findings,
        baseline=cell.cell.baseline,
        all_failed=cell.all_failed,
        num_ratios=judged.ratio.num_values if judged.ratio else 0,
    )


def _ratio_metrics(judged: Judgement) -> dict[str, Metric]:
    ratio = judged.ratio
    keys = ("vs_baseline", "vs_baseline_low", "vs_baseline_high", "detectable_percent")
    if ratio is None:
        return dict.fromkeys(keys, Metric(None, "no round to compare with the baseline's"))
    low, high = (ratio.interval.low, ratio.interval.high) if ratio.interval else (None, None)
    percent = None if judged.detectable is None else 100 * judged.detectable
    reason = "one round has no interval"
    return {
        "vs_baseline": Metric(ratio.center),
        "vs_baseline_low": Metric.of(low, reason),
        "vs_baseline_high": Metric.of(high, reason),
        "detectable_percent": Metric.of(percent, reason),
    }
