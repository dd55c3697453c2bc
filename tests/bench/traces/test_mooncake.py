"""The Mooncake reader takes the public file as it is and refuses bad rows by line and key."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.traces import read_trace
from bench.traces.mooncake import CHUNK_TOKENS, read
from deepinfer.errors import UserError

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"
GOOD = {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, 3]}
LATER = {"timestamp": 2500, "input_length": 512, "output_length": 1, "hash_ids": [0]}


@pytest.fixture
def write(tmp_path):
    def write(*rows, end="\n", final=True) -> Path:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / "trace.jsonl"
        path.write_bytes((end.join(lines) + (end if final else "")).encode())
        return path

    return write


@pytest.mark.parametrize("end", ["\r\n", "\n"])
@pytest.mark.parametrize("final", [True, False])
def test_line_ends_do_not_matter(write, end, final):
    """CRLF or LF, a final newline or none: the same requests, in seconds from the first."""
    requests = list(read(write(GOOD, LATER, end=end, final=final)))
    assert [r.arrival_s for r in requests] == [0.0, 1.5]
    assert [(r.num_prompt, r.num_output) for r in requests] == [(600, 5), (512, 1)]
    assert [r.hash_ids for r in requests] == [(0, 3), (0,)]


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ("{", "row: not JSON (got '{'); expected one JSON object with timestamp"),
        ("[1]", "row: not an object"),
        ({"timestamp": 1000}, "input_length: missing key (got 'timestamp')"),
        (
            {**GOOD, "timestamp": "soon"},
            "timestamp: not a time (got 'soon'); expected milliseconds",
        ),
        ({**GOOD, "timestamp": -1}, "timestamp: not a time (got -1)"),
        ({**GOOD, "timestamp": True}, "timestamp: not a time (got true)"),
        ({**GOOD, "timestamp": float("nan")}, "timestamp: not a time (got NaN)"),
        ({**GOOD, "timestamp": 999}, "timestamp: out of order"),
        ({**GOOD, "input_length": 0}, "input_length: not a token count (got 0); expected a whole"),
        ({**GOOD, "input_length": 600.0}, "input_length: not a token count (got 600.0)"),
        ({**GOOD, "output_length": -2}, "output_length: not a token count (got -2)"),
        ({**GOOD, "hash_ids": [1]}, "hash_ids: 1 ids (got [1]); expected 2 whole numbers"),
        ({**GOOD, "hash_ids": [1, 2, 3]}, "hash_ids: 3 ids"),
        ({**GOOD, "hash_ids": [1, "2"]}, "hash_ids: not a list of ids"),
        ({**GOOD, "hash_ids": [1, -2]}, "hash_ids: not a list of ids"),
        ({**GOOD, "hash_ids": 5}, "hash_ids: not a list of ids (got 5)"),
    ],
)
def test_bad_rows_name_line_key_and_value(write, row, part):
    """The error leads to the place in the file and says what is valid there."""
    path = write(GOOD, row)
    with pytest.raises(UserError) as caught:
        list(read(path))
    assert str(caught.value).startswith(f"{path}:2: {part}")
    assert "; expected " in str(caught.value)


def test_empty_and_binary_files(write, tmp_path):
    """A file with no rows or no text is refused."""
    with pytest.raises(UserError, match="empty file; expected JSON lines"):
        list(read(write(final=False)))
    (tmp_path / "bin").write_bytes(json.dumps(GOOD).encode() + b"\n\xfe\xff")
    with pytest.raises(UserError, match=":2: not UTF-8"):
        list(read(tmp_path / "bin"))


def test_limit_reads_no_further(write):
    """A bad row behind the limit is never seen."""
    path = write(GOOD, LATER, "rubbish")
    assert len(read_trace("mooncake", path, 2)) == 2
    with pytest.raises(UserError, match=":3: row: not JSON"):
        read_trace("mooncake", path)


@pytest.mark.traces
def test_the_public_file():
    """Counts, percentiles and prefix reuse are those published with the trace."""
    requests = list(read(TRACES / "mooncake_fast25_conversation.jsonl"))
    assert len(requests) == 12_031
    for lengths, expected in (
        ([r.num_prompt for r in requests], (6909, 27367, 126195)),
        ([r.num_output for r in requests], (350, 597, 2000)),
    ):
        found = np.percentile(lengths, [50, 90, 100], method="inverted_cdf")
        assert tuple(found.tolist()) == expected
    assert sum(r.num_output == 1 for r in requests) == 72
    assert sum(r.num_prompt % CHUNK_TOKENS == 0 for r in requests) == 22
    # Full chunks seen in an earlier prompt, as a share of all chunks, partial ones included.
    seen: set[int] = set()
    num_reused = 0
    for request in requests:
        full = request.hash_ids[: request.num_prompt // CHUNK_TOKENS]
        num_reused += sum(hash_id in seen for hash_id in full)
        seen.update(full)
    num_chunks = sum(len(request.hash_ids) for request in requests)
    assert round(100 * num_reused / num_chunks, 1) == 36.6
