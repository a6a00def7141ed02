"""Attention with sinks on the CPU in gpt-oss geometry: `sdpa` against the attention that transformers users have today.

    python benchmarks/cpu_attention.py --json results.json

Each row is checked against the fp32 reference before it is timed; a NaN, an all-zero or a wrong output gives exit
code 1. Peaks are the growth of the process's resident set, each measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from adapter.backends import registry
from adapter.backends.call import AttentionCall, Visibility

HEADS, KV_HEADS, HEAD_DIM = 64, 8, 64
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """One row of the table."""

    kind: str
    q_length: int
    kv_length: int
    window: int | None
    dtype: str


@dataclass(frozen=True)
class Row:
    """What was measured: milliseconds (median), peak extra MiB, and the error relative to the largest output."""

    shape: Shape
    eager_ms: float | None
    sdpa_ms: float
    eager_mib: float | None
    sdpa_mib: float
    error: float

    @property
    def speedup(self) -> float | None:
        """How many times faster than eager."""
        return None if self.eager_ms is None else self.eager_ms / self.sdpa_ms


def shapes(quick: bool) -> list[Shape]:
    """Decode, prefill, and windowed prefill at doubling lengths."""
    longest = 2048 if quick else 8192
    found = [Shape("decode", 1, 1024 if quick else 8192, None, d) for d in DTYPES]
    found += [Shape("prefill", n, n, None, "bf16") for n in ([512] if quick else [2048])]
    found += [Shape("window", n, n, 128, "bf16") for n in (512, 1024, 2048, 4096, 8192) if longest // 8 < n <= longest]
    return found


def make(shape: Shape) -> AttentionCall:
    """Random inputs with sinks around 2."""
    torch.manual_seed(0)
    dtype, n = DTYPES[shape.dtype], shape.kv_length
    query = torch.randn(1, HEADS, shape.q_length, HEAD_DIM, dtype=dtype)
    key, value = (torch.randn(1, KV_HEADS, n, HEAD_DIM, dtype=dtype) for _ in range(2))
    left = None if shape.window is None else shape.window - 1
    visibility = Visibility(1, shape.q_length, n, q_offset=n - shape.q_length, left=left, right=0)
    sinks = torch.randn(HEADS).add(2).to(dtype)
    return AttentionCall(query, key, value, HEAD_DIM**-0.5, visibility, sinks=sinks)


def peer(call: AttentionCall, mask: Tensor) -> Tensor:
    """Eager attention with sinks as models write it: repeated keys, an added mask, one more column."""
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (call.key, call.value))
    logits = torch.matmul(call.query, key.transpose(2, 3)) * call.scale + mask
    assert call.sinks is not None
    column = call.sinks.reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    logits = torch.cat([logits, column], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    weights = torch.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


def runner(name: str, call: AttentionCall) -> Callable[[], Tensor]:
    """One run of the peer or of sdpa; the peer's mask is made beforehand, as a model makes it once for all layers."""
    if name == "sdpa":
        backend = registry.get("sdpa")
        return lambda: backend.attend(call).output
    visible = call.visibility.to_bool(call.query.device)
    assert visible is not None
    mask = torch.zeros(visible.shape, dtype=call.query.dtype).masked_fill(~visible, torch.finfo(call.query.dtype).min)
    return lambda: peer(call, mask)


def times(runs: list[Callable[[], Tensor]], budget: float) -> list[float]:
    """Median milliseconds of each; the runs alternate, so that what else the machine does falls on all."""
    samples: list[list[float]] = [[] for _ in runs]
    started = time.perf_counter()
    while len(samples[0]) < 3 or (time.perf_counter() - started < budget and len(samples[0]) < 50):
        for run, sample in zip(runs, samples, strict=True):
            before = time.perf_counter()
            run()
            sample.append(1e3 * (time.perf_counter() - before))
    return [statistics.median(sample) for sample in samples]


def parity(shape: Shape, call: AttentionCall) -> float:
    """Largest error of sdpa relative to the largest output, on up to 64 queries at each end of the sequence."""
    output = registry.get("sdpa").attend(call).output
    if not output.isfinite().all() or not output.any():
        return float("nan")
    worst, n = 0.0, shape.q_length
    for start in {0, max(0, n - 64)}:
        stop = min(n, start + 64)
        part = call.narrow(start, stop, 0, shape.kv_length)
        wide = replace(part, query=part.query.float(), key=part.key.float(), value=part.value.float())
        exact = registry.get("reference").attend(wide).output
        worst = max(worst, ((output[:, start:stop] - exact).abs().max() / exact.abs().max()).item())
    return worst


def peak(name: str, shape: Shape) -> float:
    """Growth in MiB of the resident set's peak during one run, in a process of its own (Linux)."""
    code = [sys.executable, __file__, "--peak-of", name, json.dumps(asdict(shape))]
    return float(subprocess.run(code, capture_output=True, text=True, check=True).stdout)


def _report_peak(name: str, shape: Shape) -> None:
    with torch.no_grad():
        # a small run first, so that lazily made state is not counted
        small = replace(shape, q_length=min(shape.q_length, 64), kv_length=64, window=None)
        runner(name, make(small))()
        run = runner(name, make(shape))
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        run()
        print(_resident("VmHWM") - before)


def _resident(field: str) -> float:
    """MiB, from the kernel's account of this process: VmRSS is now, VmHWM the peak since it was cleared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measure(shape: Shape, budget: float) -> Row:
    """All numbers of one row; eager is left out where its weights would not fit a small machine."""
    call = make(shape)
    with torch.no_grad():
        error = parity(shape, call)
        affordable = HEADS * shape.q_length * shape.kv_length * 2 < 2**30
        names = ["sdpa", "eager"] if affordable else ["sdpa"]
        measured = dict(zip(names, times([runner(n, call) for n in names], budget), strict=True))
    peaks = {n: peak(n, shape) for n in names}
    return Row(shape, measured.get("eager"), measured["sdpa"], peaks.get("eager"), peaks["sdpa"], error)


COLUMNS = ("kind", "q", "kv", "dtype", "eager ms", "sdpa ms", "ratio", "eager MiB", "sdpa MiB", "error")


def line(cells: tuple[str, ...]) -> str:
    """One line of the table."""
    return " ".join(f"{cell:>9}" for cell in cells)


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, a dash where eager was left out."""
    s = row.shape
    eager = "-" if row.eager_ms is None else f"{row.eager_ms:.2f}"
    ratio = "-" if row.speedup is None else f"{row.speedup:.1f}x"
    mib = "-" if row.eager_mib is None else f"{row.eager_mib:.0f}"
    shape = (s.kind, str(s.q_length), str(s.kv_length), s.dtype)
    return (*shape, eager, f"{row.sdpa_ms:.2f}", ratio, mib, f"{row.sdpa_mib:.0f}", f"{row.error:.0e}")


def wrong(rows: list[Row]) -> list[Row]:
    """The rows whose output is not what it must be (NaN compares as wrong)."""
    allowed = {"bf16": 2e-2, "fp32": 1e-5}
    return [r for r in rows if not r.error <= allowed[r.shape.dtype]]


def main() -> int:
    """Run, print, and say by the exit code whether the outputs were right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    parser.add_argument("--quick", action="store_true", help="short lengths, for a smoke test")
    parser.add_argument("--seconds", type=float, default=6.0, help="time spent on each row's timing")
    parser.add_argument("--peak-of", nargs=2, metavar=("NAME", "SHAPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        _report_peak(options.peak_of[0], Shape(**json.loads(options.peak_of[1])))
        return 0
    print(line(COLUMNS))
    rows = []
    for shape in shapes(options.quick):
        rows.append(measure(shape, 0.5 if options.quick else options.seconds))
        print(line(cells(rows[-1])), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([{**asdict(r), "speedup": r.speedup} for r in rows], file, indent=1)
    for row in wrong(rows):
        print(f"WRONG OUTPUT: {row.shape}, error {row.error}", file=sys.stderr)
    return 1 if wrong(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
