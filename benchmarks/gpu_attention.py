"""Times attention with sinks on a CUDA device: forward, forward + backward and decode, ours beside every installed
peer.

    python benchmarks/gpu_attention.py --out results

Every time is a median of graph replays. Writes `attention.json` and, with matplotlib, `attention.png`: bars for each
peer, a line for the floor. Exits with 1 when an output of ours is not finite or not right.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_peers import NAMES, Peer, make
from torch import Tensor

COPY_BYTES_PER_SECOND = 4.3e12
MATRIX_FLOPS = 790e12
"""What a device-to-device copy and a large bf16 product reach on an H200."""
WORST_ERROR = 0.01
_CACHE_BYTES = 300e6


@dataclass(frozen=True)
class Case:
    """One geometry; `kind` is forward, backward (both passes) or decode."""

    kind: str
    batch: int
    length: int
    window: int | None = None
    heads: int = 64
    kv_heads: int = 8
    width: int = 64

    @property
    def label(self) -> str:
        """Short name for tables and bars."""
        size = f"{self.batch}x{self.length}" + ("" if self.width == 64 else f" d{self.width}")
        return f"{self.kind} {size}" + ("" if self.window is None else f" W{self.window}")

    @property
    def pairs(self) -> float:
        """Visible (query, key) pairs of one head and batch row."""
        n, w = self.length, self.window
        if self.kind == "decode":
            return n if w is None else min(n, w)
        return n * (n + 1) / 2 if w is None or w >= n else w * (w + 1) / 2 + (n - w) * w

    @property
    def flops(self) -> float:
        """Operations on visible pairs; a backward is 2.5 forwards."""
        return 4 * self.batch * self.heads * self.pairs * self.width * (3.5 if self.kind == "backward" else 1)

    @property
    def bytes(self) -> float:
        """Each input read once, each output written once."""
        if self.kind == "decode":
            return 4 * self.batch * self.kv_heads * self.pairs * self.width
        once = 2 * self.batch * self.length * self.width * (2 * self.heads + 2 * self.kv_heads)
        return once * (3 if self.kind == "backward" else 1)

    @property
    def floor(self) -> float:
        """Seconds below which no implementation can be."""
        return max(self.bytes / COPY_BYTES_PER_SECOND, self.flops / MATRIX_FLOPS)


_WIDE = {"heads": 32, "width": 128}
CASES = (
    *(Case("forward", b, n) for b, n in ((8, 2048), (2, 8192), (1, 16384), (1, 32768))),
    *(Case("forward", b, n, 128) for b, n in ((2, 8192), (1, 32768))),
    Case("forward", 2, 8192, **_WIDE),
    *(Case("backward", b, n) for b, n in ((8, 2048), (2, 8192))),
    *(Case("backward", b, n, 128) for b, n in ((8, 2048), (2, 8192))),
    Case("backward", 2, 8192, **_WIDE),
    *(Case("decode", b, n) for b, n in ((1, 8192), (1, 32768), (1, 131072), (32, 8192), (128, 2048))),
    *(Case("decode", b, n, 128) for b, n in ((1, 8192), (32, 8192), (128, 2048))),
)


def _rows(batch: int, length: int, heads: int, width: int) -> Tensor:
    return torch.randn(batch, length, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


def tensors(case: Case, copies: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """`copies` sets of query, key, value and sinks; a cache keeps heads outside tokens."""
    sinks = torch.randn(case.heads, device="cuda") + 2
    sets = []
    for _ in range(copies):
        query = _rows(case.batch, 1 if case.kind == "decode" else case.length, case.heads, case.width)
        key, value = (_rows(case.batch, case.length, case.kv_heads, case.width) for _ in range(2))
        if case.kind == "decode":
            key, value = key.contiguous(), value.contiguous()
        sets.append((query, key, value, sinks))
    return sets


def step(peer: Peer, case: Case, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> Callable[[], object]:
    """What is timed: one call, with the gradients of query, key, value and sinks for a backward case."""
    scale = case.width**-0.5
    if case.kind != "backward":
        return lambda: peer.attend(*inputs, case.window, scale)
    leaves = [t.detach().requires_grad_() for t in inputs]
    seed = torch.randn(case.batch, case.length, case.heads, case.width, device="cuda", dtype=torch.bfloat16)
    wanted = leaves if peer.has_sink else leaves[:3]

    def both() -> object:
        return torch.autograd.grad(peer.attend(*leaves, case.window, scale), wanted, seed)

    return both


def graph_seconds(steps: list[Callable[[], object]], replays: int = 15) -> float:
    """Median seconds of one step inside a CUDA graph of all of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for one in [*steps, *steps]:
            one()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [one() for one in steps]
    graph.replay()
    times = []
    for _ in range(replays):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    del kept
    return statistics.median(times) / len(steps) / 1e3


def truth(case: Case, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """The output in fp32, written as the definition."""
    query, key, value, sinks = (t.float() for t in inputs)
    group = case.heads // case.kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ key.transpose(2, 3) * case.width**-0.5
    q_length, kv_length = logits.shape[2:]
    behind = torch.arange(kv_length - q_length, kv_length, device="cuda")[:, None] - torch.arange(
        kv_length, device="cuda"
    )
    hidden = (behind < 0) if case.window is None else (behind < 0) | (behind >= case.window)
    logits = logits.masked_fill(hidden, float("-inf"))
    column = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
    return (torch.softmax(torch.cat([logits, column], 3), 3)[..., :-1] @ value).transpose(1, 2)


def error(peer: Peer, case: Case) -> float:
    """Relative L2 distance from the truth on a short version of the case."""
    short = Case("decode" if case.kind == "decode" else "forward", min(case.batch, 2), min(case.length, 1111),
    case.window,
                 case.heads, case.kv_heads, case.width)  # fmt: skip
    inputs = tensors(short, 1)[0]
    right = truth(short, inputs)
    with torch.no_grad():
        found = peer.attend(*inputs, short.window, short.width**-0.5).float()
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found - right).norm() / right.norm())


def takes(peer: Peer, case: Case) -> bool:
    """True when the peer does this kind of case."""
    if case.kind == "decode" and not peer.decodes:
        return False
    return (case.kind != "backward" or peer.trains) and (case.window is None or peer.windows)


def measure(peer: Peer, case: Case) -> dict[str, Any]:
    """One row of the result; a peer that fails has its error in place of a time."""
    row: dict[str, Any] = {"peer": peer.name, "case": case.label, "has_sink": peer.has_sink}
    try:
        row["error"] = error(peer, case) if peer.has_sink else None
        copies = max(1, min(8, int(_CACHE_BYTES / case.bytes) + 1)) if case.kind == "decode" else 1
        seconds = graph_seconds([step(peer, case, inputs) for inputs in tensors(case, copies)])
    except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as fault:
        row["failed"] = f"{type(fault).__name__}: {str(fault)[:200]}"
        return row
    row |= {
        "milliseconds": seconds * 1e3,
        "tflops": case.flops / seconds / 1e12,
        "gb_per_s": case.bytes / seconds / 1e9,
    }
    return row


def host_microseconds(peer: Peer, length: int) -> float:
    """What one call costs the processor outside a graph."""
    case = Case("decode" if length == 1 else "forward", 1, 128)
    inputs = tensors(case, 1)[0]
    with torch.no_grad():
        for _ in range(50):
            peer.attend(*inputs, None, 0.125)
        torch.cuda.synchronize()
        times = []
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(100):
                peer.attend(*inputs, None, 0.125)
            times.append(time.perf_counter() - start)
            torch.cuda.synchronize()
    return statistics.median(times) * 1e4


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars for each peer on a log scale, the floor as a line over each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(3, 1, figsize=(15, 15))
    names = list(dict.fromkeys(r["peer"] for r in rows))
    for axis, kind in zip(axes, ("forward", "backward", "decode"), strict=True):
        cases = [c for c in CASES if c.kind == kind]
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            found = {r["case"]: r.get("milliseconds") for r in rows if r["peer"] == name}
            heights = [found.get(c.label) or 0 for c in cases]
            axis.bar([x + i * width for x in range(len(cases))], heights, width, label=name)
        for x, case in enumerate(cases):
            axis.hlines(case.floor * 1e3, x - width / 2, x + 0.8 - width / 2, colors="black")
        axis.set_yscale("log")
        axis.set_ylabel("ms (black: floor)")
        axis.set_xticks([x + 0.4 for x in range(len(cases))], [c.label.replace(" ", "\n") for c in cases])
    axes[0].legend()
    shapes = "bf16, 64/8 heads (d128: 32/8), backward holds both passes"
    axes[0].set_title(f"Attention with sinks, {shapes}, {torch.cuda.get_device_name()}, lower is better")
    fig.tight_layout()
    fig.savefig(path, dpi=90)


def run_here(name: str, out: Path) -> None:
    """All cases of one peer, written to `out`."""
    torch.manual_seed(0)
    try:
        peer = make(name)
    except ImportError as missing:
        print(f"{name}: {missing}")
        return
    rows = []
    for case in CASES:
        if takes(peer, case):
            rows.append(measure(peer, case) | {"floor_ms": case.floor * 1e3})
            print(_line(rows[-1]), flush=True)
            # A fault of the device stays with the process: what was measured before it counts.
            out.write_text(json.dumps({"rows": rows, "host": {}}))
    host = {"prefill": host_microseconds(peer, 128)}
    if peer.decodes:
        host["decode"] = host_microseconds(peer, 1)
    print(f"{peer.name}: host microseconds a call {host}")
    out.write_text(json.dumps({"rows": rows, "host": host}))


def run_apart(name: str, out: Path) -> dict[str, Any]:
    """The same in a process of its own, so that a peer's illegal memory access ends only that peer."""
    part = out / f"attention_{name}.json"
    part.unlink(missing_ok=True)
    done = subprocess.run([sys.executable, __file__, "--peer", name, "--out", str(part)], check=False)
    found: dict[str, Any] = json.loads(part.read_text()) if part.exists() else {"rows": [], "host": {}}
    part.unlink(missing_ok=True)
    return found | {"status": done.returncode}


def main() -> int:
    """Run all cases; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--without", default="", help="peers to leave out, by name, separated by commas")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        run_here(options.peer, options.out)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    left_out = options.without.split(",")
    found = {name: run_apart(name, options.out) for name in NAMES if name not in left_out}
    rows = [row for part in found.values() for row in part["rows"]]
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cases": [asdict(c) | {"label": c.label} for c in CASES], "rows": rows,
        "host_microseconds": {name: part["host"] for name, part in found.items()},
        "status": {name: part["status"] for name, part in found.items()},
    }  # fmt: skip
    (options.out / "attention.json").write_text(json.dumps(result, indent=1))
    try:
        picture(rows, options.out / "attention.png")
    except ImportError as fault:
        print(f"no picture: {fault}")
    ours = found[NAMES[0]]
    wrong = [r for r in ours["rows"] if not r.get("error", float("inf")) <= WORST_ERROR or "failed" in r]
    for row in wrong:
        print("WRONG:", row, file=sys.stderr)
    return 1 if wrong or ours["status"] else 0


def _line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['case']:28s} {row['peer']:26s} {row['failed']}"
    error_text = "" if row["error"] is None else f"error {row['error']:.4f}"
    return (
        f"{row['case']:28s} {row['peer']:26s} {row['milliseconds'] * 1e3:10.1f} us {row['tflops']:6.0f} TFLOP/s "
        f"{row['gb_per_s']:6.0f} GB/s floor {row['floor_ms'] * 1e3:8.1f} us {error_text}"
    )


if __name__ == "__main__":
    sys.exit(main())
