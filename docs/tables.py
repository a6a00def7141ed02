"""Writes the tables of README.md and docs/ from the code, between `<!-- table NAME -->` and `<!-- end -->`.

python docs/tables.py            write them
python docs/tables.py --check    exit with 1 when one is out of date
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

import adapter
import fusers
from adapter.backends import registry
from adapter.backends.capability import Feature
from adapter.cli.tiny import entries, write
from adapter.errors import SinkholdError
from fusers.base import Outcome
from fusers.scan import scan_modules

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "docs/backends.md",
    "docs/errors.md",
    "docs/families.md",
    "docs/parallel.md",
    "docs/benchmarks.md",
)
RESULTS = ROOT / "benchmarks" / "results"
_MARKED = re.compile(r"(<!-- table (\w+)[^\n]*-->\n)(.*?)(<!-- end -->)", re.DOTALL)
_SINKS = Feature.SINK_PER_HEAD | Feature.SINK_PER_TOKEN


def families() -> str:
    """Every model family of the installed transformers whose attention passes a sink."""
    rows = []
    for package in _packages_with_sinks():
        found = [r for r in scan_modules(package) if r.sink and r.outcome is not Outcome.REFUSED]
        for row in found:
            kind = "from the source" if row.outcome is Outcome.RESOLVED else "at the first call"
            sink, scale = " or ".join(row.sink), " or ".join(row.scaling)
            name = row.module.split(".")[2]
            rows.append(f"| {name} | `{row.cls}` | `{sink}` | `{scale}` | {kind} |\n")
    head = "| family | attention class | sink that it passes | scale that it passes | known |\n|---|---|---|---|---|\n"
    return head + "".join(rows)


def _packages_with_sinks() -> Iterator[str]:
    folder = Path(str(transformers.__file__)).parent / "models"
    for file in sorted(folder.glob("*/modeling_*.py")):
        if re.search(r"\b(s_aux|sinks)\s*=", file.read_text(encoding="utf-8")):
            yield f"transformers.models.{file.parent.name}"


def backends() -> str:
    """What each backend of the project can do, in the order in which `auto` tries them."""
    head = "| backend | devices | dtypes | sinks | cannot |\n|---|---|---|---|---|\n"
    return head + "".join(_backend_row(name) for name in shipped_backends())


def shipped_backends() -> list[str]:
    """The names of the project's own backends, in the order in which `auto` tries them."""
    return [n for n in registry.names() if importlib.util.find_spec(f"adapter.backends.{n}") is not None]


def _backend_row(name: str) -> str:
    capability = registry.get(name).capability
    dtypes = ", ".join(sorted((str(d).removeprefix("torch.") for d in capability.dtypes), key=_width))
    sinks = ", ".join(n.removeprefix("sink ") for n in (capability.features & _SINKS).names()) or "none"
    cannot = ", ".join((~capability.features & ~_SINKS).names()) or "-"
    devices = ", ".join(sorted(capability.devices))
    return f"| `{name}` | {devices} | {dtypes} | {sinks} | {cannot} |\n"


def _width(dtype: str) -> tuple[int, str]:
    return int(re.sub(r"\D", "", dtype.split("_")[0]) or 0), dtype


def errors() -> str:
    """Every error code."""
    rows = [
        f"| {cls.code} | `{cls.__name__}` | {_sentence(cls)} | {cls.default_why or '-'} | {cls.default_fix or '-'} |\n"
        for cls in error_classes()
    ]
    return (
        "| code | class | what happened | why it is not let through | what to do |\n|---|---|---|---|---|\n"
        + "".join(rows)
    )


def error_classes() -> list[type[SinkholdError]]:
    """Every subclass of SinkholdError in the project, by code."""
    for package in (adapter, fusers):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__") and ".kernels." not in module.name:
                _try_import(module.name)
    own = [cls for cls in _subclasses(SinkholdError) if cls.__module__.partition(".")[0] in ("adapter", "fusers")]
    return sorted(own, key=lambda cls: (cls.code, cls.__name__))


def _try_import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        # A backend of a package that is not installed defines no error class of its own.
        print(f"left out: {name}: {error}", file=sys.stderr)


def _subclasses(cls: type[SinkholdError]) -> Iterator[type[SinkholdError]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _sentence(cls: type) -> str:
    return (cls.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def report() -> str:
    """The report of a tiny model, run on the CPU."""
    tiny = entries()[0]
    with tempfile.TemporaryDirectory() as folder:
        write(tiny, Path(folder))
        model = adapter.AutoModelForCausalLM.from_pretrained(folder)
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    return f"```text\n{adapter.report(model)}\n```\n"


def versions() -> str:
    """What the tables were made with."""
    return f"Made with transformers {transformers.__version__}.\n"


class Link(NamedTuple):
    """What joins two GPUs: line rate in each direction, and seconds of one step of a small and of a large message."""

    bytes_per_second: float
    small_step: float
    large_step: float


# The steps, and what a collective costs before its first one, are NCCL's own for rings (src/graph/tuning.cc: LL for
# small messages, at half the rate, and Simple for large ones).
NVLINK = Link(450e9, 0.6e-6, 3.4e-6)
INFINIBAND = Link(50e9, 2.7e-6, 14.0e-6)
SMALL_BASE, LARGE_BASE = 6.6e-6, 8.4e-6
GPUS_OF_A_HOST = 8

# As measured on an H200, see benchmarks/gpu_attention.py.
MATRIX_FLOPS, COPY_BYTES_PER_SECOND = 790e12, 4.3e12

# One layer of gpt-oss, in bf16.
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, ELEMENT = 2880, 64, 8, 64, 2
PREFILL, GPUS = 32768, (2, 4, 8, 16, 32, 64)


def kernel(case: str) -> float:
    """Seconds of the project's own kernel on an H200, as measured; the geometry is checked."""
    found = json.loads((RESULTS / "gpu_attention_h200.json").read_text())
    shape = next(c for c in found["cases"] if c["label"] == case)
    assert (shape["heads"], shape["kv_heads"], shape["width"]) == (HEADS, KV_HEADS, HEAD_DIM)
    return 1e-3 * next(_ours(found, case))


def shortest_kernel() -> float:
    """Seconds of the fastest of all measured cases; no part of a kernel is taken to be faster."""
    found = json.loads((RESULTS / "gpu_attention_h200.json").read_text())
    return 1e-3 * min(_ours(found))


def _ours(found: dict, case: str | None = None) -> Iterator[float]:
    rows = (r for r in found["rows"] if r["peer"] == "sinkhold triton" and case in (None, r["case"]))
    return (row["milliseconds"] for row in rows)


def all_reduce(ranks: int, size: float) -> float:
    """Seconds of a ring all-reduce of `size` bytes; every GPU of a host has a network port, and rings use them all."""
    if ranks == 1:
        return 0.0
    hosts = -(-ranks // GPUS_OF_A_HOST)
    between, steps = 2 * (hosts - 1), 2 * (ranks - 1)
    rate = NVLINK.bytes_per_second
    if hosts > 1:
        rate = min(rate, GPUS_OF_A_HOST * INFINIBAND.bytes_per_second)
    moved = steps / ranks * size / rate
    small = SMALL_BASE + (steps - between) * NVLINK.small_step + between * INFINIBAND.small_step + 2 * moved
    large = LARGE_BASE + (steps - between) * NVLINK.large_step + between * INFINIBAND.large_step + moved
    return min(small, large)


def all_to_all(ranks: int, size: float) -> float:
    """Seconds until each rank has sent `size` bytes in equal parts, one of them to itself; all start at once."""
    if ranks == 1:
        return 0.0
    inside = min(ranks, GPUS_OF_A_HOST)
    moved = size / ranks * (inside - 1) / NVLINK.bytes_per_second
    moved += size / ranks * (ranks - inside) / INFINIBAND.bytes_per_second
    return LARGE_BASE + _slowest(ranks).large_step + moved


def hand_on(ranks: int, size: float) -> float:
    """Seconds until each rank has sent `size` bytes to the next one."""
    link = _slowest(ranks)
    return LARGE_BASE + link.large_step + size / link.bytes_per_second


def _slowest(ranks: int) -> Link:
    return NVLINK if ranks <= GPUS_OF_A_HOST else INFINIBAND


def projections(tokens: float, ranks: int = 1) -> float:
    """Seconds of the four projections of a layer, whose heads are split over ranks; keys and values are projected
    whole where there are more ranks than their heads."""
    kv_heads = KV_HEADS / ranks if ranks <= KV_HEADS else KV_HEADS
    weights = HIDDEN * HEAD_DIM * (2 * HEADS / ranks + 2 * kv_heads)
    return max(2 * tokens * weights / MATRIX_FLOPS, ELEMENT * weights / COPY_BYTES_PER_SECOND)


def tensor_parallel_prefill(alone: float, windowed: bool, ranks: int) -> float:
    """Seconds of an attention block whose heads are split; `alone` is its kernel on one GPU."""
    return projections(PREFILL, ranks) + _part(alone, ranks) + all_reduce(ranks, PREFILL * HIDDEN * ELEMENT)


def ulysses_prefill(alone: float, windowed: bool, ranks: int) -> float:
    """Seconds of an attention block whose ranks trade tokens for heads and back."""
    token = HEAD_DIM * ELEMENT * PREFILL / ranks
    there = all_to_all(ranks, token * (HEADS + 2 * max(KV_HEADS, ranks)))
    return projections(PREFILL / ranks) + _part(alone, ranks) + there + all_to_all(ranks, token * HEADS)


def ring_prefill(alone: float, windowed: bool, ranks: int) -> float:
    """Seconds of an attention block whose keys and values go around, for the last rank, which sees the most."""
    if ranks == 1:
        return projections(PREFILL) + alone
    passing = hand_on(ranks, HEAD_DIM * ELEMENT * PREFILL / ranks * 2 * KV_HEADS)
    if windowed:  # it ends on the rank before
        around = max(_part(alone, ranks), passing) + shortest_kernel()
    else:
        own, other = _part(alone, ranks**2), _part(2 * alone, ranks**2)
        around = max(own, passing) + (ranks - 2) * max(other, passing) + other
    return projections(PREFILL / ranks) + around


def tensor_parallel_decode(alone: float, rows: int, ranks: int) -> float:
    """Seconds of an attention block that makes one token of each row; key heads are read whole on every rank."""
    kernel_time = _part(alone, min(ranks, KV_HEADS))
    return projections(rows, ranks) + kernel_time + all_reduce(ranks, rows * HIDDEN * ELEMENT)


def _part(alone: float, parts: int) -> float:
    return max(alone / parts, shortest_kernel())


def scaling_prefill() -> str:
    """Computed: the attention block of a layer in prefill, over GPUs, in milliseconds."""
    schemes = {"tensor parallel": tensor_parallel_prefill, "Ulysses": ulysses_prefill, "ring": ring_prefill}
    cases = {"full": (f"forward 1x{PREFILL}", False), "W128": (f"forward 1x{PREFILL} W128", True)}
    columns = {
        f"{kind}, {name}": partial(scheme, kernel(case), windowed)
        for kind, (case, windowed) in cases.items()
        for name, scheme in schemes.items()
    }
    return _scaling(columns, 1e3, "ms")


def scaling_decode() -> str:
    """Computed: the attention block of a layer in decode, over GPUs, in microseconds."""
    sizes = ((1, 131072), (32, 8192))
    columns = {
        f"{rows} x {length} keys": partial(tensor_parallel_decode, kernel(f"decode {rows}x{length}"), rows)
        for rows, length in sizes
    }
    return _scaling(columns, 1e6, "us")


def _scaling(columns: dict[str, Callable[[int], float]], scale: float, unit: str) -> str:
    rows = ""
    for n in (1, *GPUS):
        times = (f"{scale * f(n):#.3g}".rstrip(".") for f in columns.values())
        ratios = (f" ({f(1) / f(n):.1f}x)" if n > 1 else "" for f in columns.values())
        cells = (f"{time} {unit}{ratio}" for time, ratio in zip(times, ratios, strict=True))
        rows += f"| {n} | {' | '.join(cells)} |\n"
    return f"| GPUs | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}\n{rows}"


def parallel_cpu() -> str:
    """Measured: tensor and context parallelism on the ranks of one CPU."""
    found = json.loads((RESULTS / "parallel_cpu.json").read_text())
    assert not found["wrong"], found["wrong"]
    rows = ""
    for r in found["rows"]:
        held, spoken = f"{r['rank_bytes'] / 2**20:.0f} MiB", _listed(r["layer_collectives"])
        measured = f"{r['milliseconds']:.1f} ms | {r['ratio']:.2f} | {held} | {spoken} | {r['error']:.0e}"
        rows += f"| {r['scheme']} | {r['phase']} | {r['length']} | {r['ranks']} | {measured} |\n"
    head = (
        "scheme", "phase", "tokens", "ranks", "time", "times as fast as one rank", "weights of a rank",
        "collectives of a layer", "error",
    )  # fmt: skip
    return f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n{rows}"


def _listed(counts: dict[str, float]) -> str:
    return ", ".join(f"{n:g} {kind}" for kind, n in counts.items()) or "-"


TABLES: dict[str, Callable[[], str]] = {
    "families": families,
    "backends": backends,
    "errors": errors,
    "report": report,
    "versions": versions,
    "scaling_prefill": scaling_prefill,
    "scaling_decode": scaling_decode,
    "parallel_cpu": parallel_cpu,
}


def filled(text: str) -> str:
    """The page with every marked table written anew."""
    return _MARKED.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}{m[4]}", text)


def stale() -> list[str]:
    """The pages that differ from what the code says."""
    return [page for page in PAGES if (text := (ROOT / page).read_text()) != filled(text)]


def main() -> int:
    """Write the pages, or check them."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if "--check" in sys.argv[1:]:
        found = stale()
        for page in found:
            print(f"{page} is out of date: run python docs/tables.py")
        return 1 if found else 0
    for page in stale():
        (ROOT / page).write_text(filled((ROOT / page).read_text()))
        print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
