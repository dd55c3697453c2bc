"""Attention of one step over the paged cache: which rows are read, how, and in what batches.

`PagedAttention.prepare` turns a `StepPlan` into metadata once per step; `forward` applies it in
every layer. Three kinds of work come out of one plan:

    chunk    a sequence with many queries: its rows are gathered, one causal attention
    shared   decodes whose tables start with the same complete blocks (forks of one prompt): their
             queries form ONE block over the shared rows, gathered and rotated once, and are merged
             with each sequence's own rows by log-sum-exp (FlashAttention, arXiv:2205.14135,
             section 3.1; the same idea for prefixes: Hydragen, arXiv:2402.05099)
    alone    the other decodes, in padded batches; lengths in a batch differ by at most 2x

A decode has one query, or some more that verify drafts; those of a batch have equally many. Where a
plan was made ahead of what is known, decodes may lie further back than it says: what is gathered
has the plan's lengths, and the mask those that are true.

Keys come out of the cache unrotated and are rotated here, at the position their table column gives
them (see `deepinfer.cache_engine`). Rows are gathered head by head, so that every matrix product
and rotation runs over contiguous memory:

    index [n, kv_heads, length] = slot * kv_heads + head        K, V [n, kv_heads, length, head_dim]

Knows nothing of layers' weights, sampling or block ownership. Invariant: a row outside a sequence's
first `context_len` positions never influences it; padding reads block 0 and is masked out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.cache_engine import KVCache
from deepinfer.checks.row_tags import RowRead
from deepinfer.config import MAX_DRAFTS, ModelConfig
from deepinfer.device.base import Device
from deepinfer.models.rope import apply_rope, rope_table
from deepinfer.plan import Ints, StepPlan
from deepinfer.step_inputs import StepInputs

MIN_SHARED_ROWS = 256
"""A group must save at least this many row reads a layer: below it, its launches cost more."""

MAX_DECODE_QUERIES = 1 + MAX_DRAFTS
"""Sequences with so many queries, or fewer, are decodes."""

MAX_GATHER_ROWS = 1 << 15
"""Most rows (padding included) gathered at once: bounds the workspace, 64 MiB at 2 KiB a row."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows to gather for n sequences of up to `length` positions.

    `index` int64 [n * kv_heads * length]; `rope` complex64 [1 or n, 1, length, head_dim / 2];
    `mask` bool [n, 1, 1 or Q, length], True = valid, None if all are. `readers`, indices
    into the step's sequences, are whom the rows are for, from position `begin` on.
    """

    num_seqs: int
    readers: Ints
    begin: int
    length: int
    index: Tensor
    rope: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's queries `tokens` over its rows; `mask` [1, 1, rep * Tq, ctx] or None if the
    queries are all of its positions."""

    tokens: slice
    rows: Rows
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Decodes:
    """A padded batch of sequences with Tq queries each; `tokens` int64 [n * Tq], their places."""

    tokens: Tensor
    rows: Rows


@dataclass(frozen=True, slots=True)
class SharedDecodes:
    """Queries of G sequences, Tq each, over common rows, then each over its own.

    `tokens` int64 [G * Tq]; `tails` are (slice of the G sequences, their own rows).
    """

    tokens: Tensor
    prefix: Rows
    tails: list[tuple[slice, Rows]]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one step share."""

    slots: Tensor  # int64 [T], where the new rows go
    rope: Tensor  # complex64 [T, 1, head_dim / 2], of the queries
    chunks: list[Chunk]
    alone: list[Decodes]
    shared: list[SharedDecodes]

    @property
    def rows(self) -> list[Rows]:
        """All that is gathered in each layer."""
        rows = [chunk.rows for chunk in self.chunks] + [batch.rows for batch in self.alone]
        for group in self.shared:
            rows += [group.prefix, *(own for _, own in group.tails)]
        return rows


class PagedAttention:
    """Grouped-query attention over a `KVCache` on any torch device.

    Not thread-safe: the workspaces belong to the step that runs now, on one stream.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        device: Device,
        max_model_len: int,
        *,
        min_shared_rows: int = MIN_SHARED_ROWS,
    ) -> None:
        self._cache = cache
        self._device = device
        self._min_shared_rows = min_shared_rows
        self._kv_heads = config.num_key_value_heads
        self._repeat = config.num_attention_heads // config.num_key_value_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._rope = rope_table(config, max_model_len, device.torch_device)
        self._workspaces: list[Tensor] = [cache.keys(0).new_empty(0) for _ in range(2)]

    # -- once per step -------------------------------------------------------------------------

    @torch.inference_mode()
    def prepare(self, inputs: StepInputs) -> AttentionPlan:
        """Group the sequences of a plan and put what the layers need on the device."""
        plan = inputs.plan
        counts = plan.num_scheduled
        chunks = np.flatnonzero(counts > MAX_DECODE_QUERIES).tolist()
        slots, positions = self._places(inputs)
        step = AttentionPlan(
            slots=slots,
            rope=self._rope[positions][:, None],
            chunks=[self._chunk(inputs, seq) for seq in chunks],
            alone=[],
            shared=[],
        )
        for num_queries in np.unique(counts[counts <= MAX_DECODE_QUERIES]).tolist():
            self._add_decodes(step, inputs, np.flatnonzero(counts == num_queries), num_queries)
        return step

    def _places(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Where the step's rows go, int64 [T], and their positions, int [T]."""
        plan, device, size = inputs.plan, self._device, self._cache.block_size
        if inputs.back is None:
            return device.upload(plan.slot_mapping), device.upload(plan.positions)
        seqs = plan.token_seqs
        positions = inputs.really(plan.positions, seqs, device)
        tables = device.upload(np.ascontiguousarray(plan.block_tables))
        blocks = tables[device.upload(seqs), positions // size].long()
        return blocks * size + positions % size, positions

    def _add_decodes(
        self, step: AttentionPlan, inputs: StepInputs, decoding: Ints, num_queries: int
    ) -> None:
        """Group the sequences `decoding`, which have `num_queries` each."""
        plan, before = inputs.plan, inputs.plan.context_lens[decoding] - num_queries
        if inputs.back is not None:
            assert plan.ahead is not None, "only plans made ahead are moved"
            before = before - plan.ahead.num_unsure[decoding]
        groups = shared_groups(
            plan.block_tables[decoding],
            before // self._cache.block_size,
            max(self._min_shared_rows // self._cache.block_size, 1),
        )
        lonely = np.ones(len(decoding), bool)
        for members, _ in groups:
            lonely[members] = False
        for seqs, rows in self._padded(inputs, decoding[lonely], 0, num_queries):
            step.alone.append(Decodes(self._tokens(plan, seqs, num_queries), rows))
        for members, num_blocks in groups:
            step.shared.append(self._shared(inputs, decoding[members], num_blocks, num_queries))

    def _tokens(self, plan: StepPlan, seqs: Ints, num_queries: int) -> Tensor:
        """The places of all queries of `seqs`, int64 [n * num_queries]."""
        places = plan.query_start[seqs].astype(np.int64)[:, None] + np.arange(num_queries)
        tokens: Tensor = self._device.upload(places.ravel())
        return tokens

    def _chunk(self, inputs: StepInputs, seq: int) -> Chunk:
        plan = inputs.plan
        start, end = int(plan.query_start[seq]), int(plan.query_start[seq + 1])
        context = int(plan.context_lens[seq])
        rows = self._rows(inputs, np.array([seq], np.int32), 0, context)
        mask = None
        if end - start < context:
            keys = torch.arange(context, device=rows.index.device)
            mask = keys <= keys[context - (end - start) :, None]
            mask = mask.repeat(self._repeat, 1)[None, None]
        return Chunk(slice(start, end), rows, mask)

    def _shared(
        self, inputs: StepInputs, seqs: Ints, num_blocks: int, num_queries: int
    ) -> SharedDecodes:
        length = num_blocks * self._cache.block_size
        prefix = self._rows(inputs, seqs[:1], 0, length, readers=seqs)
        tails, ordered, begin = [], [], 0
        for members, rows in self._padded(inputs, seqs, num_blocks, num_queries):
            tails.append((slice(begin, begin + len(members)), rows))
            ordered.append(members)
            begin += len(members)
        tokens = self._tokens(inputs.plan, np.concatenate(ordered), num_queries)
        return SharedDecodes(tokens, prefix, tails)

    def _padded(
        self, inputs: StepInputs, seqs: Ints, first_block: int, num_queries: int
    ) -> list[tuple[Ints, Rows]]:
        """Batches of sequences by length from `first_block` on, within 2x and the row budget."""
        batches = []
        lengths = inputs.plan.context_lens[seqs] - first_block * self._cache.block_size
        order = np.argsort(-lengths, kind="stable")
        seqs, lengths = seqs[order], lengths[order]
        begin = 0
        while begin < len(seqs):
            longest = int(lengths[begin])
            end = int(np.searchsorted(-lengths, -longest / 2, side="right"))
            end = min(end, begin + max(MAX_GATHER_ROWS // longest, 1))
            batch = seqs[begin:end]
            rows = self._rows(inputs, batch, first_block, longest, num_queries=num_queries)
            batches.append((batch, rows))
            begin = end
        return batches

    def _rows(
        self,
        inputs: StepInputs,
        seqs: Ints,
        first_block: int,
        length: int,
        readers: Ints | None = None,
        *,
        num_queries: int = 0,
    ) -> Rows:
        """The rows of `length` positions from `first_block` on; slots are made on the device.

        `readers` where others read the rows of `seqs` too. With `num_queries` the last of them
        sees all rows of its sequence, and each one before it one row less; without, all are seen.
        """
        plan, size = inputs.plan, self._cache.block_size
        num_blocks = -(-length // size)
        begin = first_block * size
        table = plan.block_tables[seqs, first_block : first_block + num_blocks]
        blocks = self._device.upload(np.ascontiguousarray(table)).long()
        offsets = torch.arange(size, device=blocks.device)
        slots = (blocks[:, :, None] * size + offsets).flatten(1)[:, :length]
        mask = None
        valid = plan.context_lens[seqs] - begin
        is_whole = num_queries <= 1 and inputs.back is None and (valid >= length).all()
        if num_queries and not is_whole:
            visible = valid[:, None] - np.arange(num_queries)[::-1]
            of = np.broadcast_to(seqs[:, None], visible.shape)
            lengths = inputs.really(visible, of, self._device)
            within = torch.arange(length, device=blocks.device) < lengths[:, :, None]
            slots = slots.masked_fill(~within[:, -1], 0)
            if num_queries > 1:
                within = within.repeat_interleave(self._repeat, 1)
            mask = within[:, None]
        heads = torch.arange(self._kv_heads, device=blocks.device)
        index = slots[:, None] * self._kv_heads + heads[:, None]
        rope = self._rope[begin : begin + length][None, None]
        readers = seqs if readers is None else readers
        return Rows(len(seqs), readers, begin, length, index.flatten(), rope, mask)

    def reads(self, plan: AttentionPlan) -> list[RowRead]:
        """The slots that `forward` will gather, taken from the very indices it uses."""
        return [
            RowRead(
                rows.readers,
                rows.begin,
                rows.index.view(rows.num_seqs, self._kv_heads, rows.length)[:, 0] // self._kv_heads,
            )
            for rows in plan.rows
        ]

    # -- once per layer ------------------------------------------------------------------------

    def forward(self, layer: int, plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new rows of a layer, then attend.

        Args:
            q: [T, heads, head_dim], not yet rotated.
            k: [T, kv_heads, head_dim], not yet rotated.
            v: [T, kv_heads, head_dim].

        Returns:
            [T, heads * head_dim].
        """
        self._cache.write(layer, plan.slots, k, v)
        q = apply_rope(q, plan.rope)
        out = torch.empty_like(q)
        for chunk in plan.chunks:
            out[chunk.tokens] = self._attend_chunk(layer, chunk, q[chunk.tokens])
        for batch in plan.alone:
            out.index_copy_(0, batch.tokens, self._attend_alone(layer, batch, q))
        for group in plan.shared:
            out.index_copy_(0, group.tokens, self._attend_shared(layer, group, q))
        return out.flatten(1)

    def _attend_chunk(self, layer: int, chunk: Chunk, q: Tensor) -> Tensor:
        """[Tq, heads, head_dim] of one sequence's queries."""
        k, v = self._gather(layer, chunk.rows)
        queries = q.transpose(0, 1)[None]
        if chunk.mask is None:
            out = F.scaled_dot_product_attention(queries, k, v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)
        # Heads of a group are folded into the query length: with a mask, the fused kernels take
        # that on every device, grouped heads they do not.
        folded = queries.reshape(1, self._kv_heads, -1, self._head_dim)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=chunk.mask)
        return out.reshape(-1, q.shape[0], self._head_dim).transpose(0, 1)

    def _attend_alone(self, layer: int, batch: Decodes, q: Tensor) -> Tensor:
        """[n * Tq, heads, head_dim] of one padded batch."""
        k, v = self._gather(layer, batch.rows)
        queries = self._queries(q, batch.tokens, batch.rows.num_seqs)
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=batch.rows.mask)
        return self._by_token(out)

    def _attend_shared(self, layer: int, group: SharedDecodes, q: Tensor) -> Tensor:
        """[G * Tq, heads, head_dim] of one group, in the order of `group.tokens`."""
        queries = self._queries(q, group.tokens, len(group.prefix.readers))
        k, v = self._gather(layer, group.prefix)
        # [G, kv_heads, Q, d] -> [1, kv_heads, G * Q, d], and back for each statistic.
        folded = queries.transpose(0, 1).reshape(1, self._kv_heads, -1, self._head_dim)
        prefix = tuple(
            part.view(self._kv_heads, -1, queries.shape[2], part.shape[-1]).transpose(0, 1)
            for part in self._partial(folded, k, v, None)
        )
        out = torch.empty_like(queries)
        for members, rows in group.tails:
            k, v = self._gather(layer, rows)
            tail = self._partial(queries[members], k, v, rows.mask)
            out[members] = _merge([part[members] for part in prefix], tail)
        return self._by_token(out)

    def _queries(self, q: Tensor, tokens: Tensor, num_seqs: int) -> Tensor:
        """The queries of `tokens`, heads by group: [n, kv_heads, Q = Tq * rep, head_dim]."""
        shape = (num_seqs, -1, self._kv_heads, self._repeat, self._head_dim)
        by_seq = q.index_select(0, tokens).view(shape).transpose(1, 2)
        return by_seq.reshape(num_seqs, self._kv_heads, -1, self._head_dim)

    def _by_token(self, out: Tensor) -> Tensor:
        """What `_queries` did, undone: [n, kv_heads, Q, head_dim] -> [n * Tq, heads, head_dim]."""
        by_head = out.view(len(out), self._kv_heads, -1, self._repeat, self._head_dim)
        return by_head.transpose(1, 2).reshape(-1, self._kv_heads * self._repeat, self._head_dim)

    def _partial(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention over some of the rows: unnormalised sum, maximum and sum of exponentials.

        q [n, kv_heads, Q, d], k and v [n, kv_heads, L, d] -> float32 [n, kv_heads, Q, d | 1 | 1].
        """
        keys = k.float().flatten(0, 1).transpose(1, 2)
        queries = q.float().flatten(0, 1)
        scores = torch.bmm(queries * self._scale, keys).view(*q.shape[:3], -1)
        if mask is not None:
            scores.masked_fill_(~mask, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        summed = torch.bmm(weights.flatten(0, 1).to(v.dtype), v.flatten(0, 1))
        return summed.float().view(q.shape), top, total

    def _gather(self, layer: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """Rotated K and V of `rows`, [n, kv_heads, length, head_dim], in the workspaces."""
        gathered = []
        for i, source in enumerate(self._cache.head_rows(layer)):
            num = rows.index.shape[0]
            if self._workspaces[i].numel() < num * self._head_dim:
                self._workspaces[i] = source.new_empty(num * self._head_dim)
            target = self._workspaces[i][: num * self._head_dim].view(num, self._head_dim)
            torch.index_select(source, 0, rows.index, out=target)
            shape = (rows.num_seqs, self._kv_heads, rows.length, self._head_dim)
            gathered.append(target.view(shape))
        return apply_rope(gathered[0], rows.rope, inplace=True), gathered[1]


def _merge(a: list[Tensor], b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The attention over the union of two disjoint sets of rows, from their `_partial` results."""
    (sum_a, top_a, total_a), (sum_b, top_b, total_b) = a, b
    top = torch.maximum(top_a, top_b)
    scale_a, scale_b = (top_a - top).exp_(), (top_b - top).exp_()
    return (sum_a * scale_a + sum_b * scale_b) / (total_a * scale_a + total_b * scale_b)


def shared_groups(tables: Ints, num_complete: Ints, min_saved: int) -> list[tuple[Ints, int]]:
    """Sequences whose tables start with the same blocks, and how many blocks they share.

    A group splits where its tables part if that saves more reads (forks of forks, several prompts
    behind one system prompt). Every member keeps at least one row of its own.

    Args:
        tables: int32 [D, W].
        num_complete: int32 [D], leading blocks of each that may be shared.
        min_saved: fewest block reads, (members - 1) * shared blocks, that make a group.

    Returns:
        (int64 [G] indices into the D sequences, shared blocks); groups are disjoint.
    """
    found = _split(tables, num_complete, np.arange(len(tables)), 0)
    return [(members, num) for members, num in found if (len(members) - 1) * num >= min_saved]


def _split(tables: Ints, limit: Ints, members: Ints, column: int) -> list[tuple[Ints, int]]:
    """Groups of two or more among `members`, whose tables agree before `column`."""
    longer = members[limit[members] > column]
    if len(longer) < 2:
        return []
    blocks, group_of = np.unique(tables[longer, column], return_inverse=True)
    if len(blocks) == len(longer):
        return []
    groups: list[tuple[Ints, int]] = []
    for number in np.flatnonzero(np.bincount(group_of) > 1).tolist():
        same = longer[group_of == number]
        most = int(limit[same].min())
        differs = (tables[same, column:most] != tables[same[0], column:most]).any(axis=0)
        shared = column + (int(differs.argmax()) if differs.any() else most - column)
        parts = _split(tables, limit, same, shared)
        apart = sum((len(part) - 1) * num for part, num in parts)
        groups += parts if apart > (len(same) - 1) * shared else [(same, shared)]
    return groups
