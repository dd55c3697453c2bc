"""Row formats against formulas that look every number up in the list of all there are."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.errors import UserError
from deepinfer.models.hybrid.formats import quantise, row_format
from deepinfer.models.hybrid.geometry import CACHES, SCALE_BLOCK

GOLDEN = Path(__file__).parents[3] / "golden"
KINDS = tuple(SCALE_BLOCK)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(code: int) -> float:
    """The number of a positive e4m3 code, 0 to 126: four exponent bits, three mantissa bits."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return mantissa * 2.0**-9
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = [e4m3(code) for code in range(127)]


def nearest(x: float, numbers: list[float]) -> int:
    """The code of the nearest number; between two, the even code."""
    x = min(x, numbers[-1])
    best = min(abs(x - number) for number in numbers)
    codes = [code for code, number in enumerate(numbers) if abs(x - number) == best]
    return next((code for code in codes if code % 2 == 0), codes[0])


def slow_scale(kind: str, amax: np.float32) -> float:
    """The scale of a block by the formulas; e4m3 / 6 in float32, powers of two from float bits."""
    if kind == "compressed":
        least = np.float32(6 * 2.0**-9)
        return E4M3[nearest(float(max(amax, least) / np.float32(6)), E4M3)]
    least, largest = (1e-4, 448) if kind == "window" else (6 * 2.0**-126, 6)
    ratio = max(amax, np.float32(least)) * np.float32(1 / largest)
    assert ratio.dtype == np.float32
    mantissa, exponent = math.frexp(float(ratio))  # ratio = mantissa * 2^exponent, 0.5 <= it < 1
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def slow_quantise(kind: str, x: np.ndarray) -> np.ndarray:
    """`quantise` of one row, element by element."""
    numbers = E4M3 if kind == "window" else E2M1
    block = SCALE_BLOCK[kind]
    out = np.empty_like(x)
    for start in range(0, len(x), block):
        part = x[start : start + block]
        scale = slow_scale(kind, np.abs(part).max())
        for i, value in enumerate(part):
            scaled = np.float32(abs(value)) / np.float32(scale)
            number = numbers[nearest(float(scaled), numbers)] * scale
            out[start + i] = np.copysign(np.float32(number), value)
    return out


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal, the signs of zeros and NaN included."""
    return left.dtype == right.dtype and torch.equal(
        left.view(torch.int32), right.view(torch.int32)
    )


def spread(num_rows: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, a few elements zero."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, dim, generator=rng)
    x *= torch.exp2(torch.randint(-12, 12, (num_rows, 1), generator=rng).float())
    return x.masked_fill(torch.rand(num_rows, dim, generator=rng) < 0.02, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_that_of_the_formulas(kind):
    """Every element of rows of all sizes is the nearest number, ties to the even code."""
    x = spread(60, 64)
    expected = torch.from_numpy(np.stack([slow_quantise(kind, row) for row in x.numpy()]))
    assert same_bits(quantise(kind, x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_borders_between_two_numbers(kind):
    """Exactly between two neighbours, and one float above and below, for every pair of them."""
    numbers = torch.tensor(E4M3 if kind == "window" else E2M1)
    between = (numbers[1:] + numbers[:-1]) / 2
    points = torch.cat(
        [
            numbers,
            between,
            torch.nextafter(between, torch.tensor(torch.inf)),
            torch.nextafter(between, torch.tensor(0.0)),
        ]
    )
    block = SCALE_BLOCK[kind]
    rows = torch.nn.functional.pad(points, (0, -len(points) % (block - 1))).view(-1, block - 1)
    largest = torch.full((len(rows), 1), float(numbers[-1]))
    for sign in (1.0, -1.0):  # the largest number in each block makes the scale 1
        x = torch.cat((largest, sign * rows), 1)
        expected = torch.from_numpy(np.stack([slow_quantise(kind, row) for row in x.numpy()]))
        assert same_bits(quantise(kind, x), expected)


@pytest.mark.parametrize(
    ("kind", "amax", "scale"),
    [
        ("window", 0.0, 2.0**-22),  # 1e-4 / 448 = 0.936 * 2^-22
        ("window", 1e-4, 2.0**-22),
        ("window", 448.0, 1.0),
        ("window", math.nextafter(448.0, 449.0), 1.0),  # lost in float32
        ("window", 448.0001, 2.0),
        ("window", 3e38, 2.0**120),
        ("index", 0.0, 2.0**-126),
        ("index", 1e-40, 2.0**-126),
        ("index", 6.0, 1.0),
        ("index", 6.000001, 2.0),
        ("index", 2.5e38, 2.0**125),
        ("compressed", 0.0, 2.0**-9),
        ("compressed", 6 * 2.0**-9, 2.0**-9),
        ("compressed", 9 * 2.0**-9, 2.0**-8),  # 1.5 steps, a tie: to the even code
        ("compressed", 6.0, 1.0),
        ("compressed", 6.3, 1.0),  # 1.05: to nearest, so the largest element is cut
        ("compressed", 6.75, 1.125),
        ("compressed", 2688.0, 448.0),
        ("compressed", 3e38, 448.0),
    ],
)
def test_scales(kind, amax, scale):
    """The scale of a block whose largest element is `amax`, minima and maxima included."""
    x = torch.zeros(1, SCALE_BLOCK[kind])
    x[0, 3] = -amax
    rows = row_format("packed", kind, x.shape[1]).encode(x)
    byte = rows[0, -1]
    if kind == "compressed":
        assert E4M3[byte] == scale
    else:
        assert 2.0 ** (int(byte) - 127) == scale
    assert slow_scale(kind, np.float32(amax)) == scale
    assert same_bits(quantise(kind, x)[0], torch.from_numpy(slow_quantise(kind, x[0].numpy())))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_hold_exactly_the_quantised_numbers(kind):
    """decode(encode(x)) and quantise(x) are equal bit for bit, zeros of either sign too."""
    x = torch.cat((spread(200, 64), torch.zeros(1, 64), -torch.zeros(1, 64), torch.ones(1, 64)))
    packed = row_format("packed", kind, 64)
    rows = packed.encode(x)
    assert (rows.dtype, rows.shape) == (torch.uint8, (len(x), packed.width))
    assert same_bits(packed.decode(rows, torch.float32), quantise(kind, x))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_hold_every_code(kind):
    """Encoding what a row decodes to gives the row back, for rows with every element code."""
    codes = [code for code in range(256) if code & 127 != 127] if kind == "window" else range(16)
    numbers = E4M3 if kind == "window" else E2M1
    half = len(codes) // 2
    x = torch.tensor([*numbers[:half], *(-number for number in numbers[:half])])
    block = SCALE_BLOCK[kind]
    x = torch.nn.functional.pad(x, (0, -len(x) % (block - 1))).view(-1, block - 1)
    x = torch.cat((torch.full((len(x), 1), numbers[-1]), x), 1)
    packed = row_format("packed", kind, block)
    assert same_bits(packed.decode(packed.encode(x), torch.float32), x)


@pytest.mark.parametrize("kind", KINDS)
def test_quantising_twice_is_quantising_once(kind):
    """Also of blocks with the smallest scales; not of compressed blocks below e4m3's normals."""
    x = spread(300, 64) if kind != "compressed" else spread(300, 64).clamp(min=6 * 2.0**-6)
    once = quantise(kind, x)
    assert same_bits(quantise(kind, once), once)


@pytest.mark.parametrize("kind", KINDS)
def test_real_rows_have_the_bytes_of_the_served_system(kind):
    """528, 288 and 68 bytes."""
    dim, num_bytes = {"window": (512, 528), "compressed": (512, 288), "index": (128, 68)}[kind]
    packed = row_format("packed", kind, dim)
    assert packed.bytes_per_row == num_bytes
    assert packed.encode(spread(2, dim)).shape == (2, num_bytes)
    assert row_format("fp32", kind, dim).bytes_per_row == 4 * dim
    assert row_format("bf16", kind, dim).bytes_per_row == 2 * dim


def test_where_the_bytes_of_a_row_are():
    """Data first, the even index in the low half of its byte, then scales in block order."""
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1], x[0, 33] = 6.0, -0.5, 12.0
    rows = row_format("packed", "index", 64).encode(x)
    assert rows[0, 0] == 0b1001_0111
    assert rows[0, 16] == 0b0111_0000
    assert rows[0, 32:].tolist() == [127, 128]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_result_has_the_dtype_asked_for(kind, dtype):
    """A quantised number fits bfloat16, so the dtype changes nothing but the input's own digits."""
    x = spread(20, 32).to(torch.bfloat16)
    exact = quantise(kind, x.float())
    assert torch.equal(quantise(kind, x.to(dtype)).double(), exact.double())
    packed = row_format("packed", kind, 32)
    decoded = packed.decode(packed.encode(x.to(dtype)), dtype)
    assert decoded.dtype == dtype
    assert torch.equal(decoded.double(), exact.double())


@pytest.mark.parametrize(("cache", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_float_rows_are_cast_and_nothing_else(cache, dtype):
    """What is written comes back as the storage dtype holds it."""
    x = spread(5, 24)
    plain = row_format(cache, "window", 24)
    assert torch.equal(plain.encode(x), x.to(dtype))
    assert torch.equal(plain.decode(plain.encode(x), torch.float32), x.to(dtype).float())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_numbers_do_not_become_plausible_ones(kind, bad):
    """A NaN spoils its block and no other; an infinity does too, or is cut to the largest."""
    x = torch.ones(1, 64)
    x[0, 5] = bad
    block = SCALE_BLOCK[kind]
    packed = row_format("packed", kind, 64)
    out = packed.decode(packed.encode(x), torch.float32)[0]
    assert same_bits(out, quantise(kind, x)[0])
    if kind == "compressed" and math.isinf(bad):
        assert out[5] == math.copysign(448 * 6, bad)
    else:
        assert out[:block].isnan().all()
    assert torch.equal(out[block:], quantise(kind, torch.ones(64))[block:])


def test_a_width_without_whole_scales_is_refused():
    """One line with the kind and the number; float rows take any width."""
    with pytest.raises(UserError, match="every 16 elements, and their width 24"):
        row_format("packed", "compressed", 24)
    with pytest.raises(UserError, match="cache: unknown name 'fp23'") as caught:
        row_format("fp23", "window", 32)
    assert caught.value.hint is not None
    assert "did you mean 'fp32'" in caught.value.hint
    with pytest.raises(UserError, match="kind of row"):
        row_format("fp32", "ring", 32)
    assert [row_format(cache, "window", 32).cache for cache in CACHES] == list(CACHES)


def golden(kind: str) -> list[tuple[str, np.ndarray, np.ndarray | None]]:
    """Every quantised tensor of a kind: its name, the tensor, and what it was before if known.

    Before the first quantiser has acted, `raw` and `qat` are the same: layer 0.
    """
    name = {"window": "window_kv", "compressed": "compressed_rows", "index": "index_k"}[kind]
    found = []
    for file in ("v41_a", "v41_b"):
        data = np.load(GOLDEN / f"{file}.npz")
        for key in data.files:
            if key.startswith("qat.0.") and key.endswith(f".{name}"):
                before = data[key.replace("qat", "raw")] if ".L0." in key else None
                found.append((f"{file} {key}", data[key], before))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_golden_rows_are_fixed_points(kind):
    """What the reference port quantised is not changed by quantising, nor by storing, it."""
    tensors = golden(kind)
    assert len(tensors) == {"window": 6, "compressed": 5, "index": 5}[kind]
    for name, after, _ in tensors:
        x = torch.from_numpy(after)
        assert torch.equal(quantise(kind, x), x), name
        packed = row_format("packed", kind, x.shape[-1])
        assert torch.equal(packed.decode(packed.encode(x), torch.float32), x), name


def test_golden_window_rows_from_their_unquantised_values():
    """The first layer's keys before the quantiser, quantised here, are the port's."""
    pairs = [
        (name, after, before) for name, after, before in golden("window") if before is not None
    ]
    assert len(pairs) == 2
    for name, after, before in pairs:
        assert torch.equal(quantise("window", torch.from_numpy(before)), torch.from_numpy(after)), (
            name
        )
