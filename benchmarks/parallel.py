"""Scaling of an adapted model in gpt-oss geometry: tensor and context parallelism against one rank.

    python benchmarks/parallel.py --ranks 1 2 4 --device cpu --out results.json

starts the ranks on this machine, once for each number. On several machines start it with torchrun on each of them:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/parallel.py --device cuda --out results.json

The model is made from a config with random weights and sinks above 2. In each start rank 0 first runs the whole model
alone, with all cores of its machine; every row is that run's time over the ranks' and is compared with its outputs.
Times are medians, of which the slowest rank counts. A row that is wrong, empty or not a number gives exit code 1.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import adapter
from adapter.parallel import ContextParallel, context_parallel, shards_of, start_ranks

METHODS = ("ulysses", "ring")
GENERATION, TRAINING = ("prefill", "decode"), ("forward", "forward + backward")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": (1e-4, 1e-3), "bf16": (4e-2, 1e-1)}
"""Relative L2 distance to one rank that is let through: of outputs, and in a backward, of the gradients too."""
_SEEN = 256
"""Entries of the vocabulary that are compared, at every position."""


@dataclass(frozen=True)
class Size:
    """A model, and the tokens that it is given: a prompt to continue, and lengths to spread over ranks."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    vocabulary: int
    window: int
    prompt: int
    new_tokens: int
    lengths: tuple[int, ...]


SIZES = {
    "tiny": Size(2, 64, 4, 2, 16, 4, 128, 8, 24, 4, (64,)),
    "small": Size(4, 256, 8, 4, 64, 8, 1024, 128, 512, 32, (512, 2048)),
    "large": Size(8, 2880, 64, 8, 64, 8, 32768, 128, 4096, 64, (8192, 16384)),
}


@dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
        scheme: "one rank", "tensor parallel", "ulysses" or "ring".
        phase: one of GENERATION or TRAINING; a decode is one token.
        length: tokens of the prompt or of the sequence.
        milliseconds, one_rank_milliseconds: medians.
        tokens: how many came out.
        rank_bytes: parameters that the fullest rank holds.
        collectives: kind -> how often the ranks speak in one forward.
        layer_collectives: kind -> how often they do in one decoder layer, on average over the layers.
        error: relative L2 distance to one rank, the worst of all ranks; None for what has no finite one.
    """

    scheme: str
    phase: str
    length: int
    ranks: int
    milliseconds: float
    one_rank_milliseconds: float
    tokens: int
    rank_bytes: int
    collectives: dict[str, int]
    layer_collectives: dict[str, float]
    error: float | None

    @property
    def ratio(self) -> float:
        """How many times as fast as one rank."""
        return self.one_rank_milliseconds / self.milliseconds if self.milliseconds else math.nan


Lap = dict[str, tuple[float, dict[str, Tensor]]]
"""Phase -> seconds, and outputs by name."""


def write_model(size: Size, dtype: torch.dtype, folder: str) -> None:
    """A checkpoint with random weights, the same wherever it is written."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim, sliding_window=size.window, num_local_experts=size.experts, num_experts_per_tok=2,
        initializer_range=size.hidden**-0.5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=131072, pad_token_id=0, eos_token_id=2, dtype=dtype,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            parameter.data.copy_(torch.randn(parameter.shape).abs() + 2)
        if "experts.down_proj" in name:  # or one rounding, which sends a token to another expert, would show
            parameter.data.mul_(0.1)
    model.save_pretrained(folder)


@contextmanager
def model_folder(size: Size, dtype: torch.dtype) -> Iterator[str]:
    """The model on disk, written once on each machine; every rank must enter and leave."""
    own = tempfile.TemporaryDirectory(prefix="sinkhold-") if os.environ["LOCAL_RANK"] == "0" else None
    if own is not None:
        write_model(size, dtype, own.name)
    machine = os.environ.get("GROUP_RANK", "0")
    told = gathered((machine, None if own is None else own.name))
    yield next(folder for place, folder in told if place == machine and folder is not None)
    wait_for_all()
    if own is not None:
        own.cleanup()


def gathered(value: Any) -> list[Any]:
    """The value of every rank."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def wait_for_all() -> None:
    """Until every rank is here."""
    if dist.is_initialized():
        dist.barrier()


def now() -> float:
    """Seconds, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seen(logits: Tensor) -> Tensor:
    """What is compared of logits."""
    return logits[..., :_SEEN].detach()


@torch.no_grad()
def generation(model: Any, ids: Tensor, prompt: int) -> Lap:
    """Prefill of the first `prompt` tokens, and the others one by one."""
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    start = now()
    filled = model(input_ids=ids[:, :prompt], use_cache=True)
    middle = now()
    logits = [seen(filled.logits[:, :0])]
    for i in range(prompt, ids.shape[1]):
        step = model(input_ids=ids[:, i : i + 1], **{cache: filled[cache]})
        logits.append(seen(step.logits))
    decoded = (now() - middle) / max(1, ids.shape[1] - prompt)
    outputs = {"prefill": seen(filled.logits), "decode": torch.cat(logits, dim=1)}
    return {p: (s, {"logits": outputs[p]}) for p, s in zip(GENERATION, (middle - start, decoded), strict=True)}


def training(model: Any, ids: Tensor, context: ContextParallel | None = None) -> Lap:
    """A forward without gradients, and a forward with a backward up to the gradients of one process."""
    batch = {"input_ids": ids, "labels": ids}
    if context is not None:
        batch = context.split(batch)
    tokens = {name: value for name, value in batch.items() if name in ("input_ids", "position_ids")}
    with torch.no_grad():
        start = now()
        logits = model(**tokens, use_cache=False).logits
        forward = now() - start
    model.zero_grad()
    start = now()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    if context is not None:
        context.reduce_gradients()
    both = now() - start
    length = ids.shape[1]
    whole = [seen(x) if context is None else context.gather(seen(x), length=length) for x in (logits, output.logits)]
    return {
        "forward": (forward, {"logits": whole[0]}),
        "forward + backward": (both, {"logits": whole[1], **gradients(model)}),
    }


def gradients(model: Any) -> dict[str, Tensor]:
    """Those of all sinks, and of the other parameters of the first attention."""
    layers = [m for m in model.modules() if isinstance(m, adapter.Attention)]
    sinks = torch.cat([attn.sinks.grad for attn in layers])
    rest = [p.grad.flatten() for p in layers[0].owner.parameters() if p is not layers[0].sinks]
    return {"gradient of the sinks": sinks, "gradient of the first attention": torch.cat(rest)}


def repeated(lap: Callable[[], Lap], repeats: int, together: bool = True) -> Lap:
    """Median seconds of each phase, and the last outputs; with `together` all ranks start at once and the slowest
    counts in each repeat."""
    found = lap()  # the first one chooses and proves backends
    seconds: dict[str, list[float]] = {phase: [] for phase in found}
    for _ in range(repeats):
        if together:
            wait_for_all()
        found = lap()
        slowest = [max(of_phase) for of_phase in zip(*gathered_seconds(found, together), strict=True)]
        for sample, value in zip(seconds.values(), slowest, strict=True):
            sample.append(value)
    return {phase: (statistics.median(seconds[phase]), outputs) for phase, (_, outputs) in found.items()}


def gathered_seconds(found: Lap, together: bool) -> list[list[float]]:
    """The seconds of each phase, of every rank or of this one."""
    own = [seconds for seconds, _ in found.values()]
    return gathered(own) if together else [own]


class Collectives(TorchDispatchMode):
    """While it is active, counts how often this rank speaks to others, by kind: in all, and within decoder layers."""

    _kinds: ClassVar[dict[str, str | None]] = {
        "allreduce_": "all-reduce", "all_reduce": "all-reduce", "alltoall_base_": "all-to-all",
        "all_to_all_single": "all-to-all", "allgather_": "all-gather", "all_gather_into_tensor": "all-gather",
        "recv_": None, "wait_tensor": None, "_wrap_tensor_autograd": None,
    }  # fmt: skip

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.within: Counter[str] = Counter()
        attentions = [m for m in model.modules() if isinstance(m, adapter.Attention)]
        self.layers = {path: model.get_submodule(path) for path in (a.path.rpartition(".")[0] for a in attentions)}
        self._is_within = False
        self._handles: list[Any] = []

    def __enter__(self) -> Any:
        for layer in self.layers.values():
            self._handles.append(layer.register_forward_pre_hook(lambda *_: self._move(True)))
            self._handles.append(layer.register_forward_hook(lambda *_: self._move(False), always_call=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _move(self, is_within: bool) -> None:
        self._is_within = is_within

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        kind = self._kinds.get(name, name) if "c10d" in func.namespace else None
        if kind is not None:
            self.counts[kind] += 1
            self.within[kind] += self._is_within
        return func(*args, **(kwargs or {}))


def collectives(model: Any, run: Callable[[], object]) -> tuple[dict[str, int], dict[str, float]]:
    """Kind -> how often `run`, one forward of the model, lets this rank speak to others: in all, and in a layer."""
    with torch.no_grad(), Collectives(model) as found:
        run()
    return dict(found.counts), {kind: n / len(found.layers) for kind, n in found.within.items() if n}


def on_cpu(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs in fp32, on the CPU."""
    return {name: tensor.float().cpu() for name, tensor in outputs.items()}


def distance(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The worst relative L2 distance over all outputs; infinite for one that is missing, empty or not finite."""
    worst = 0.0
    for name, exact in right.items():
        one = on_cpu({name: found[name]})[name]
        off = float((one - exact).norm() / exact.norm()) if one.shape == exact.shape else math.inf
        worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst


class Bench:
    """What one start of the ranks measures; every rank makes and runs one."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.size, self.repeats, self.folder = options.size, options.repeats, folder
        self.dtype, self.device = DTYPES[options.dtype], torch.device(options.device)
        self.ranks, self.rank = len(gathered(0)), int(os.environ["RANK"])
        self.rows: list[Row] = []
        self.alone: dict[int, Lap] = {}

    def run(self) -> list[Row]:
        """All rows of this number of ranks."""
        model = adapter.AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype).to(self.device).eval()
        self._measure_alone(model)
        if self.ranks == 1:
            for length, lap in self.alone.items():
                self._add("one rank", model, length, lap)
            return self.rows
        for method in METHODS:
            self._measure_context(model, method)
        del model
        self._measure_tensor()
        return self.rows

    def tokens(self, length: int) -> Tensor:
        """Token ids [1, length], the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(3, self.size.vocabulary, (1, length), generator=generator).to(self.device)

    def _generate(self, model: Any) -> Lap:
        return generation(model, self.tokens(self.size.prompt + self.size.new_tokens), self.size.prompt)

    def _measure_alone(self, model: Any) -> None:
        if self.rank == 0:
            threads = torch.get_num_threads()
            torch.set_num_threads(os.cpu_count() or 1)
            jobs = [(n, partial(training, model, self.tokens(n))) for n in self.size.lengths]
            for length, job in [(self.size.prompt, partial(self._generate, model)), *jobs]:
                lap = repeated(job, self.repeats, together=False)
                kept = {phase: (seconds, on_cpu(outputs)) for phase, (seconds, outputs) in lap.items()}
                self.alone.setdefault(length, {}).update(kept)
            model.zero_grad()
            torch.set_num_threads(threads)
        if self.ranks > 1:
            told = [self.alone]
            dist.broadcast_object_list(told, src=0)
            self.alone = told[0]

    def _measure_context(self, model: Any, method: str) -> None:
        with context_parallel(model, method=method) as context:
            for length in self.size.lengths:
                ids = self.tokens(length)
                found = repeated(partial(training, model, ids, context), self.repeats)
                part = context.split({"input_ids": ids})
                self._add(method, model, length, found, partial(model, **part, use_cache=False))
        model.zero_grad()

    def _measure_tensor(self) -> None:
        model = adapter.AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype, tp_plan="auto").eval()
        found = repeated(partial(self._generate, model), self.repeats)
        self._add("tensor parallel", model, self.size.prompt, found, partial(model, input_ids=self.tokens(1)))

    def _add(self, scheme: str, model: Any, length: int, lap: Lap, forward: Callable[[], object] | None = None) -> None:
        shards = shards_of(model)
        held = max(gathered(shards.held + shards.whole))
        spoken = collectives(model, forward) if forward is not None else ({}, {})
        for phase, (seconds, outputs) in lap.items():
            alone, right = self.alone[length][phase]
            error = max(gathered(distance(outputs, right)))
            times, tokens = (1e3 * seconds, 1e3 * alone), outputs["logits"].shape[1]
            finite = error if math.isfinite(error) else None
            self.rows.append(Row(scheme, phase, length, self.ranks, *times, tokens, held, *spoken, finite))


def faults(rows: list[Row], dtype: str, size: Size, ranks: list[int]) -> list[str]:
    """What is wrong with the rows, one line for each; a row that is not there is wrong too."""
    found = []
    for row in rows:
        outputs, backward = TOLERANCES[dtype]
        allowed = backward if row.phase == "forward + backward" else outputs
        name = f"{row.scheme}, {row.phase} {row.length}, {row.ranks} ranks"
        if row.tokens <= 0:
            found.append(f"{name}: no tokens")
        elif row.error is None or not row.error <= allowed:
            found.append(f"{name}: error {row.error}, allowed {allowed}")
        elif not 0 < row.milliseconds < math.inf:
            found.append(f"{name}: {row.milliseconds} ms")
    missing = {(*key, n) for n in ranks for key in expected(size, n)} - {
        (r.scheme, r.phase, r.length, r.ranks) for r in rows
    }
    return found + [f"{s}, {phase} {length}, {n} ranks: no row" for s, phase, length, n in sorted(missing)]


def expected(size: Size, ranks: int) -> list[tuple[str, str, int]]:
    """Scheme, phase and length of every row for a number of ranks."""
    generating, spreading = (("one rank",), ("one rank",)) if ranks == 1 else (("tensor parallel",), METHODS)
    return [
        *((scheme, phase, size.prompt) for scheme in generating for phase in GENERATION),
        *((scheme, phase, n) for scheme in spreading for phase in TRAINING for n in size.lengths),
    ]


def machine(device: str) -> dict[str, Any]:
    """What the times depend on."""
    found: dict[str, Any] = {
        "processor": processor(), "cores": os.cpu_count(), "machines": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "collectives": "nccl" if device == "cuda" else "gloo", "python": platform.python_version(),
        "torch": torch.__version__, "transformers": transformers.__version__, "sinkhold": adapter.__version__,
    }  # fmt: skip
    return found


def processor() -> str:
    """Its name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


COLUMNS = ("scheme", "phase", "length", "ranks", "ms", "one rank", "ratio", "MiB each", "spoken", "error")


def line(cells: tuple[str, ...]) -> str:
    """One line of the table."""
    widths = (16, 19, 7, 6, 10, 10, 7, 9, 7, 8)
    return "".join(f"{c:<{w}}" if i < 2 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths, strict=True)))


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    error = "none" if row.error is None else f"{row.error:.0e}"
    times = (f"{row.milliseconds:.2f}", f"{row.one_rank_milliseconds:.2f}", f"{row.ratio:.2f}x")
    held, spoken = f"{row.rank_bytes / 2**20:.1f}", str(sum(row.collectives.values()))
    return row.scheme, row.phase, str(row.length), str(row.ranks), *times, held, spoken, error


def note(device: str, ranks: list[int], machines: int) -> str:
    """What the ratios mean on this device."""
    if device == "cuda" or machines > 1:
        return "ratio: how many times as fast as one rank"
    cores = os.cpu_count() or 1
    threads = ", ".join(f"{max(1, cores // n)} for {n}" for n in ranks)
    return (
        f"ratio: how many times as fast as one rank. All ranks share the {cores} cores of one machine (threads of each "
        f"rank: {threads}), so no speed-up is to be expected: what is below 1 is the price of the split."
    )


def run_rank(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """As one of several ranks: measure, and leave the process group."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    transformers.utils.logging.disable_progress_bar()
    start_ranks()
    with model_folder(options.size, DTYPES[options.dtype]) as folder:
        rows = Bench(options, folder).run()
    facts = machine(options.device)
    if dist.is_initialized():
        dist.destroy_process_group()
    return rows, facts


def launch(ranks: int, options: argparse.Namespace, arguments: list[str]) -> tuple[list[Row], dict[str, Any]]:
    """Start this script as several ranks of this machine; no rows when one of them fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="sinkhold-") as folder:
        part = Path(folder) / "part.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0", "--local-addr=localhost", __file__, *arguments, "--part", str(part),
        ]  # fmt: skip
        status = subprocess.run(command, env=environment, check=False).returncode
        if status or not part.exists():
            print(f"{ranks} ranks ended with exit code {status}", file=sys.stderr)
            return [], {}
        found = json.loads(part.read_text())
    return [Row(**row) for row in found["rows"]], found["machine"]


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The options; `size` is the whole Size."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="ranks to start; under torchrun its own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="bf16 on CUDA, else fp32")
    parser.add_argument("--size", choices=tuple(SIZES), help="large on CUDA, else small")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, help="tokens to decode")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens to spread over ranks")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of each row")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not cuda:
        parser.error("--device cuda: this machine has no CUDA device")
    if options.device == "cpu" and cuda and "WORLD_SIZE" in os.environ:
        parser.error("--device cpu: hide the GPUs from torchrun with CUDA_VISIBLE_DEVICES=")
    options.dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
    given = {name: getattr(options, name) for name in ("prompt", "new_tokens", "lengths")}
    size = SIZES[options.size or ("large" if options.device == "cuda" else "small")]
    options.size = replace(size, **{name: value for name, value in given.items() if value is not None})
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and say by the exit code whether the outputs were right."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    if "WORLD_SIZE" in os.environ:
        ranks = [int(os.environ["WORLD_SIZE"])]
        rows, facts = run_rank(options)
        if os.environ["RANK"] != "0":
            return 0
        if options.part:
            options.part.write_text(json.dumps({"rows": [asdict(row) for row in rows], "machine": facts}))
            return 0
        print(line(COLUMNS))
        print("\n".join(line(cells(row)) for row in rows))
    else:
        ranks, rows, facts = sorted(set(options.ranks)), [], {}
        print(line(COLUMNS))
        for n in ranks:
            found, told = launch(n, options, arguments)
            print("".join(f"{line(cells(row))}\n" for row in found), end="", flush=True)
            rows, facts = rows + found, told or facts
    print(note(options.device, ranks, facts.get("machines", 1)))
    wrong = faults(rows, options.dtype, options.size, ranks)
    if options.out:
        report = {
            "machine": facts, "dtype": options.dtype, "size": asdict(options.size), "repeats": options.repeats,
            "note": note(options.device, ranks, facts.get("machines", 1)),
            "rows": [{**asdict(row), "ratio": row.ratio} for row in rows], "wrong": wrong,
        }  # fmt: skip
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    for text in wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
