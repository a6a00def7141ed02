"""Ring attention: keys and values travel around the ranks, each keeps its queries, and the sink joins once at the end.

The blocks are merged by their log-sum-exps without a sink. Over all keys, with lse_s = logaddexp(lse, sink), the merged
output times sigmoid(lse - sink) is the softmax over keys and sink. In the backward every block gets this output and
lse_s, which makes its gradients exact, and that of the sink is -sum(exp(sink - lse_s) * rowsum(grad * output)).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backends.call import AttentionCall, Visibility
from ..backends.sdpa_math import lse_dtype
from .partial import Partial


def attend(call: AttentionCall, group: dist.ProcessGroup, partial: Partial) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks; every rank of the group must call it.

    Args:
        call: query, key and value of this rank, [batch, heads, length, head_dim], all ranks' lengths equal; its
            visibility is that of these queries over the keys of all ranks, in the order of the ranks. Sinks are
            [num_heads] or None.
        group: the ranks.
        partial: what computes one block.

    Returns:
        Output [batch, length, num_heads, v_head_dim]. After backward each rank holds its own queries' part of the
        sink's gradient: the sum over the ranks is that of one rank.
    """
    query, scale = (call.query, call.scale) if call.scale > 0 else (-call.query, -call.scale)
    job = _Job(call.visibility, scale, call.softcap, group, partial)
    output: Tensor = _Ring.apply(query, call.key, call.value, call.sinks, job)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True, eq=False)
class _Job:
    """All of a call but its tensors, and the ranks that share it."""

    visibility: Visibility
    scale: float
    softcap: float | None
    group: dist.ProcessGroup
    partial: Partial

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def last_step(self) -> int:
        """The last step at which any rank sees the block that it then holds."""
        v = self.visibility
        return _last_step(self.size, v.q_length, v.left, v.right)

    def block(self, query: Tensor, key: Tensor, value: Tensor, source: int) -> AttentionCall | None:
        """The call of the own queries with the keys of rank `source`; None where none of them is visible."""
        length = key.shape[2]
        visibility = self.visibility.narrow(0, query.shape[2], source * length, (source + 1) * length)
        start, stop = visibility.kv_range()
        if start == stop:
            return None
        return AttentionCall(query, key, value, self.scale, visibility, softcap=self.softcap)

    def around(self, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """The tensors of each rank in turn with its number, one's own first; the next ones come in meanwhile."""
        for step in range(self.last_step + 1):
            passing = self.start_pass(tensors, 1) if step < self.last_step else None
            yield (self.rank - step) % self.size, tensors
            if passing is not None:
                tensors = passing.arrived()

    def start_pass(self, tensors: tuple[Tensor, ...], by: int) -> _Pass:
        """Send tensors `by` ranks onwards and receive those from as far behind."""
        coming = tuple(torch.empty_like(t) for t in tensors)
        onwards, behind = (dist.get_global_rank(self.group, (self.rank + n) % self.size) for n in (by, -by))
        sends = [dist.P2POp(dist.isend, t, onwards, self.group) for t in tensors]
        receives = [dist.P2POp(dist.irecv, t, behind, self.group) for t in coming]
        return _Pass(tensors, coming, dist.batch_isend_irecv([*sends, *receives]))


@dataclass(frozen=True, eq=False)
class _Pass:
    """Tensors under way: what goes must live until what comes has arrived."""

    going: tuple[Tensor, ...]
    coming: tuple[Tensor, ...]
    works: list[Any]

    def arrived(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.coming


@lru_cache(maxsize=256)
def _last_step(size: int, length: int, left: int | None, right: int | None) -> int:
    def sees(rank: int, source: int) -> bool:
        v = Visibility(1, length, length, rank * length, source * length, left=left, right=right)
        start, stop = v.kv_range()
        return stop > start

    useful = (step for step in range(size) if any(sees(rank, (rank - step) % size) for rank in range(size)))
    return max(useful, default=0)


class _Ring(torch.autograd.Function):
    """The keys pass every rank once forward and once backward, with their gradients in tow."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, job: _Job) -> Tensor:
        key, value = key.contiguous(), value.contiguous()
        output, lse = _nothing(query, value)
        for source, (k, v) in job.around(key, value):
            block = job.block(query, k, v, source)
            if block is not None:
                output, lse = _merged(output, lse, *job.partial.forward(block))
        output, lse_s = _join(output, lse, sinks)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, lse_s)
        ctx.job = job
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx.job, grad, *ctx.saved_tensors), None)


def _gradients(
    job: _Job,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    output: Tensor,
    lse_s: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value and sinks; those of a key travel with it and end where it came from."""
    wide = lse_s.dtype
    dq = torch.zeros_like(query, dtype=wide)
    dkv: tuple[Tensor, ...] = (torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide))
    passing: _Pass | None = None
    for source, (k, v) in job.around(key, value):
        block = job.block(query, k, v, source)
        found = job.partial.backward(block, grad, output, lse_s) if block is not None else None
        dkv = dkv if passing is None else passing.arrived()
        if found is not None:
            dq += found[0]
            dkv[0].add_(found[1])
            dkv[1].add_(found[2])
        passing = job.start_pass(dkv, 1) if (job.rank - source) % job.size < job.last_step else None
    if job.last_step:  # each gradient stands with the last rank that may see its keys
        dkv = job.start_pass(dkv, -job.last_step).arrived()
    d_sinks = None if sinks is None else _sink_gradient(sinks, grad, output, lse_s)
    return dq.to(query.dtype), dkv[0].to(key.dtype), dkv[1].to(value.dtype), d_sinks


def _nothing(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over no key at all."""
    batch, num_heads, length, _ = query.shape
    wide = lse_dtype(query.dtype)
    output = query.new_zeros(batch, length, num_heads, value.shape[3], dtype=wide)
    return output, query.new_full((batch, num_heads, length), float("-inf"), dtype=wide)


def _merged(output: Tensor, lse: Tensor, more: Tensor, its_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the keys of both, each the softmax over its own."""
    total = torch.logaddexp(lse, its_lse)
    floor = total.masked_fill(total == float("-inf"), 0)  # exp(-inf - 0): a row without any key stays zero
    own, its = ((part - floor).exp().transpose(1, 2)[..., None] for part in (lse, its_lse))
    return output.mul_(own).add_(more * its), total


def _join(output: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp with the sink as one more column, whose value is zero."""
    if sinks is None:
        return output, lse
    sink = sinks.to(lse.dtype)[None, :, None]
    return output * torch.sigmoid(lse - sink).transpose(1, 2)[..., None], torch.logaddexp(lse, sink)


def _sink_gradient(sinks: Tensor, grad: Tensor, output: Tensor, lse_s: Tensor) -> Tensor:
    delta = (grad.to(lse_s.dtype) * output).sum(dim=3).transpose(1, 2)
    weight = torch.exp(sinks.to(lse_s.dtype)[None, :, None] - lse_s)
    return -(weight * delta).sum(dim=(0, 2)).to(sinks.dtype)
