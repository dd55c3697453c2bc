"""KV storage: geometry, row writes, block copies."""

import pytest
import torch

from deepinfer.cache_engine import KVCache, bytes_per_block
from tests.deepinfer.step_plans import TINY

BLOCK_SIZE = 4


@pytest.fixture
def cache() -> KVCache:
    return KVCache(TINY, num_blocks=6, block_size=BLOCK_SIZE, torch_device=torch.device("cpu"))


def fill(cache: KVCache) -> None:
    """Give every element of K and V a value of its own."""
    for layer in range(TINY.num_hidden_layers):
        keys, values = cache.keys(layer), cache.values(layer)
        keys.copy_(torch.arange(keys.numel()).view(keys.shape) + 1e4 * layer)
        values.copy_(-torch.arange(keys.numel()).view(keys.shape) - 1e4 * layer)


def test_bytes_per_block_counts_k_and_v_of_all_layers(cache: KVCache) -> None:
    """A block's bytes are 2 tensors x layers x positions x kv heads x head_dim x 4 in float32."""
    assert cache.bytes_per_block == 2 * 2 * BLOCK_SIZE * 2 * 16 * 4
    assert bytes_per_block(TINY, BLOCK_SIZE) == cache.bytes_per_block
    stored = sum(cache.keys(i).nbytes + cache.values(i).nbytes for i in range(2))
    assert stored == 6 * cache.bytes_per_block


def test_write_touches_only_its_slots_in_its_layer(cache: KVCache) -> None:
    """Rows land at block slot // size, offset slot % size; nothing else changes."""
    torch.manual_seed(0)
    k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    cache.write(1, torch.tensor([9, 4, 23]), k, v)
    for row, (block, offset) in enumerate([(2, 1), (1, 0), (5, 3)]):
        assert torch.equal(cache.keys(1)[block, offset], k[row])
        assert torch.equal(cache.values(1)[block, offset], v[row])
    assert cache.keys(1).count_nonzero() == k.numel()
    assert cache.keys(0).count_nonzero() == 0


def test_copy_blocks_moves_k_and_v_of_every_layer(cache: KVCache) -> None:
    """A copied block equals its source in every layer; other blocks stay as they were."""
    fill(cache)
    before = [(cache.keys(i).clone(), cache.values(i).clone()) for i in range(2)]
    cache.copy_blocks(torch.tensor([[1, 3], [2, 5]], dtype=torch.int32))
    source_of = [0, 1, 2, 1, 4, 2]
    for layer, (keys, values) in enumerate(before):
        assert torch.equal(cache.keys(layer), keys[source_of])
        assert torch.equal(cache.values(layer), values[source_of])


def test_copy_blocks_reads_all_sources_first(cache: KVCache) -> None:
    """A chain (1 -> 2, 2 -> 3) and a swap copy what was there before the call."""
    fill(cache)
    before = cache.keys(0).clone()
    cache.copy_blocks(torch.tensor([[1, 2], [2, 3], [4, 5], [5, 4]], dtype=torch.int32))
    assert torch.equal(cache.keys(0), before[[0, 1, 1, 2, 5, 4]])


def test_head_rows_are_views_of_one_head(cache: KVCache) -> None:
    """Row slot * kv_heads + head of `head_rows` is that head's row at that slot."""
    fill(cache)
    keys, values = cache.head_rows(1)
    assert torch.equal(keys[(2 * BLOCK_SIZE + 3) * 2 + 1], cache.keys(1)[2, 3, 1])
    assert torch.equal(values[(2 * BLOCK_SIZE + 3) * 2 + 1], cache.values(1)[2, 3, 1])


def test_erase_zeroes_one_token_in_all_layers(cache: KVCache) -> None:
    """Position 2 * block size + 1 lies at offset 1 of the block it is said to be in."""
    fill(cache)
    before = [(cache.keys(layer).clone(), cache.values(layer).clone()) for layer in (0, 1)]
    cache.erase(2 * BLOCK_SIZE + 1, 3, 0)
    for layer, planes in enumerate(before):
        for plane, now in zip(planes, (cache.keys(layer), cache.values(layer)), strict=True):
            plane[3, 1] = 0
            assert torch.equal(now, plane)
