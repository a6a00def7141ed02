"""Ring and head-scattering attention over gloo ranks equal the reference on the whole sequence, gradients included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import adapter
from adapter.backends import reference, registry
from adapter.backends.call import AttentionCall, Visibility
from adapter.backends.capability import Needs
from adapter.parallel import ring, start_ranks, ulysses
from adapter.parallel.partial import partial_for
from tests.mutation.apply import Mutant, mutated
from tests.parallel.ranks import RankFailed, run_ranks

LENGTH = 24
METHODS = ("ring", "ulysses")


def _documents():
    return torch.tensor([[0] * 5 + [1] * 10 + [2] * 9, [3] * 24])


def _padding(left):
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[0, :7] = not left
    padding[1, 20:] = left
    return padding


CASES = {
    "full": {},
    "causal": {"right": 0},
    "window": {"right": 0, "left": 4},
    "window over a rank": {"right": 0, "left": 9},
    "window both ways": {"right": 3, "left": 3},
    "one group of heads": {"right": 0, "kv_heads": 1},
    "no sink": {"right": 0, "sinks": False},
    "head dims": {"right": 0, "v_width": 12},
    "documents": {"right": 0, "documents": _documents()},
    "left padding": {"right": 0, "left": 9, "padding": _padding(True)},
    "right padding": {"padding": _padding(False)},
    "nothing is seen": {"right": -30, "sinks": False},
    "negative scale": {"right": 0, "scale": -0.3},
    "softcap": {"right": 0, "left": 9, "softcap": 3.0},
}


def whole_call(options, dtype=torch.float32):
    options = dict(options)
    kv_heads, v_width = options.pop("kv_heads", 2), options.pop("v_width", 16)
    has_sinks, softcap, scale = options.pop("sinks", True), options.pop("softcap", None), options.pop("scale", 0.25)
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return (1.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    query, key, value = draw(2, 4, LENGTH, 16), draw(2, kv_heads, LENGTH, 16), draw(2, kv_heads, LENGTH, v_width)
    sinks = draw(4) + 2 if has_sinks else None
    visibility = Visibility(2, LENGTH, LENGTH, **options)
    return AttentionCall(query, key, value, scale, visibility, sinks=sinks, softcap=softcap)


def gradients(call, output, upstream):
    wanted = [t for t in (call.query, call.key, call.value, call.sinks) if t is not None]
    return torch.autograd.grad(output, wanted, upstream, allow_unused=True, materialize_grads=True)


def with_leaves(call, rows=slice(None)):
    def leaf(tensor):
        return tensor.detach().clone().requires_grad_()

    cut = [leaf(t[:, :, rows]) for t in (call.query, call.key, call.value)]
    return replace(call, query=cut[0], key=cut[1], value=cut[2], sinks=None if call.sinks is None else leaf(call.sinks))


def upstream_of(shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


def errors(method, options):
    """On a rank: the largest error of output and gradients over the reference's scale, by name."""
    exact = with_leaves(whole_call(options, torch.float64))
    output = reference.BACKEND.attend(exact).output
    upstream = upstream_of(output.shape)
    truth = [output.detach(), *gradients(exact, output, upstream)]

    rank, size = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * LENGTH // size, (rank + 1) * LENGTH // size)
    own = with_leaves(whole_call(options), rows)
    v = own.visibility
    documents = None if v.documents is None else v.documents[:, rows]
    own.visibility = v.with_(q_length=LENGTH // size, q_offset=rows.start, query_documents=documents)
    if method == "ring":
        found = ring.attend(own, dist.group.WORLD, partial_for("auto", Needs.of(own)))
    else:
        found = ulysses.attend(own, dist.group.WORLD, lambda c: registry.select("auto", Needs.of(c)).attend(c))
    parts = [found.detach(), *gradients(own, found, upstream[:, rows].float())]
    if own.sinks is not None:
        dist.all_reduce(parts[4])
    names = ("output", "query", "key", "value", "sinks")[: len(parts)]
    cuts = (truth[0][:, rows], *(t[:, :, rows] for t in truth[1:4]), *truth[4:])
    return {
        name: float((part - cut).abs().max() / whole.abs().max().clamp(min=1e-3))
        for name, part, cut, whole in zip(names, parts, cuts, truth, strict=True)
    }


def all_errors(method, cases):
    start_ranks()
    return {name: errors(method, CASES[name]) for name in cases}


@pytest.fixture(scope="module", params=[2, 4])
def measured(request):
    left_out = {"ring": "softcap", "ulysses": "negative scale"}  # no backend of the CPU can
    wanted = {method: [name for name in CASES if name != left_out[method]] for method in METHODS}
    return {method: run_ranks(request.param, all_errors, method, wanted[method]) for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_output_and_gradients_equal_the_reference(measured, method):
    assert len(measured[method]) > 1
    for rank, cases in enumerate(measured[method]):
        for name, found in cases.items():
            assert max(found.values()) <= 2e-5, (rank, name, found)


MUTANTS = [
    Mutant("ring: the sink is dropped", "adapter/parallel/ring.py", "_join(output, lse, sinks)",
           "_join(output, lse, None)", ("ring",)),
    Mutant("ring: the sink joins in every block", "adapter/parallel/ring.py",
           "_merged(output, lse, *job.partial.forward(block))",
           "_merged(output, lse, *_join(*job.partial.forward(block), sinks))", ("ring",)),
    Mutant("ring: the sink joins on one rank only", "adapter/parallel/ring.py", "_join(output, lse, sinks)",
           "_join(output, lse, sinks if job.rank == 0 else None)", ("ring",)),
    Mutant("ring: the backward without the sink", "adapter/parallel/ring.py",
           "ctx.save_for_backward(query, key, value, sinks, output, lse_s)",
           "ctx.save_for_backward(query, key, value, sinks, output, lse)", ("ring",)),
    Mutant("ring: gradients of keys stay where they were made", "adapter/parallel/ring.py",
           "dkv = job.start_pass(dkv, -job.last_step).arrived()", "pass", ("ring",)),
    Mutant("ring: blocks are taken for another rank's", "adapter/parallel/ring.py",
           "yield (self.rank - step) % self.size, tensors", "yield (self.rank + step) % self.size, tensors", ("ring",)),
    Mutant("ring: the round ends too early", "adapter/parallel/ring.py", "range(self.last_step + 1)",
           "range(self.last_step)", ("ring",)),
    Mutant("ulysses: the sink is dropped", "adapter/parallel/ulysses.py",
           "call.sinks[rank * heads : (rank + 1) * heads]", "None", ("ulysses",)),
    Mutant("ulysses: the sink joins on one rank only", "adapter/parallel/ulysses.py",
           "None if call.sinks is None else", "None if call.sinks is None or rank else", ("ulysses",)),
    Mutant("ulysses: every rank takes the first heads' sinks", "adapter/parallel/ulysses.py",
           "call.sinks[rank * heads : (rank + 1) * heads]", "call.sinks[:heads]", ("ulysses",)),
    Mutant("ulysses: parts of the sequence in another order", "adapter/parallel/ulysses.py",
           "piece.reshape(part.shape).permute", "piece.reshape(part.shape).flip(0).permute", ("ulysses",)),
    Mutant("ulysses: queries keep the place of one rank", "adapter/parallel/ulysses.py",
           "q_offset=0, query_documents=None", "query_documents=None", ("ulysses",)),
]  # fmt: skip


def errors_with(mutants):
    start_ranks()
    found = []
    for mutant in mutants:
        with mutated(mutant):
            worst = max(max(errors(mutant.checks[0], CASES[name]).values()) for name in ("causal", "documents"))
        worst = torch.tensor(worst).nan_to_num(float("inf"))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        found.append(float(worst))
    return found


def test_a_sink_that_is_dropped_doubled_or_misplaced_is_seen():
    for rank in run_ranks(4, errors_with, MUTANTS):
        seen = {mutant.name: worst for mutant, worst in zip(MUTANTS, rank, strict=True)}
        assert min(seen.values()) > 1e-3, seen


def softcapped_ring():
    start_ranks()
    errors("ring", CASES["softcap"])


def test_a_ring_refuses_what_no_backend_can_merge():
    with pytest.raises(RankFailed, match=r"sdpa: no softcap(.|\n)*method=\"ulysses\""):
        run_ranks(2, softcapped_ring, timeout=60)
    with pytest.raises(adapter.ParallelError, match="eager: it returns no log-sum-exp"):
        partial_for("eager", Needs.of(whole_call({"right": 0})))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "works"), [(4, 2, 3, "1, 2, 4"), (6, 3, 2, "1, 3, 6"), (4, 1, 8, "1, 2, 4")]
)
def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_work(heads, kv_heads, size, works):
    with pytest.raises(adapter.ParallelError, match=f'use one of these sizes: {works}; or method="ring"'):
        ulysses.check_heads(heads, kv_heads, size)
