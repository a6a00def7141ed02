"""Faults where the sink joins the log-sum-exp of torch's ops, forward and backward."""

from __future__ import annotations

from .apply import faults

MATH = "adapter/backends/sdpa_math.py"
OP = "adapter/backends/sdpa_op.py"
BLOCKS = "adapter/backends/blocks.py"

MUTANTS = (
    *faults(
        MATH,
        "return torch.sigmoid(lse - sink), torch.logaddexp(lse, sink)",
        ["sdpa"],
        {
            "sdpa: the sink is dropped": "return torch.ones_like(lse), lse",
            "sdpa: the share of the sink instead of the keys'": (
                "return torch.sigmoid(sink - lse), torch.logaddexp(lse, sink)"
            ),
            "sdpa: dropped in the backward pass": "return torch.sigmoid(lse - sink), lse + 0 * sink",
            "sdpa: dropped in the forward pass": "return torch.ones_like(lse), torch.logaddexp(lse, sink)",
            "sdpa: counted twice": (
                "return torch.sigmoid(lse - sink - 0.6931471805599453), torch.logaddexp(lse, sink + 0.6931471805599453)"
            ),
            "sdpa: log-sum-exp taken as one of base two": (
                "return torch.sigmoid(lse * 0.6931471805599453 - sink), torch.logaddexp(lse, sink)"
            ),
        },
    ),
    *faults(
        MATH,
        "_join(lse, _sink(call, rows, lse.dtype))",
        ["sdpa"],
        {
            "sdpa: counted once for every block of queries before": (
                "_join(lse, None if rows.start else _sink(call, rows, lse.dtype))"
            ),
        },
    ),
    *faults(
        MATH,
        "return call.sinks.to(dtype)[None, :, None]",
        ["sdpa"],
        {
            "sdpa: heads in reverse": "return call.sinks.flip(0).to(dtype)[None, :, None]",
            "sdpa: multiplied by the scale": "return call.scale * call.sinks.to(dtype)[None, :, None]",
        },
    ),
    *faults(
        MATH,
        "return call.sinks.to(dtype)[None, :, None]",
        ["sdpa precision"],
        {
            "sdpa: rounded to the query's dtype": ("return call.sinks.to(call.query.dtype).to(dtype)[None, :, None]"),
        },
    ),
    *faults(
        MATH,
        "return call.sinks[:, :, rows, 0].to(dtype)",
        ["sdpa"],
        {
            "sdpa: per token, queries in reverse": "return call.sinks.flip(2)[:, :, rows, 0].to(dtype)",
        },
    ),
    *faults(
        MATH,
        "d_sink = -torch.exp(",
        ["sdpa"],
        {
            "sdpa: dsink has the other sign": "d_sink = torch.exp(",
            "sdpa: dsink is twice too large": "d_sink = -2 * torch.exp(",
        },
    ),
    *faults(
        MATH,
        "d_sink.sum(dim=(0, 2)) if",
        ["sdpa"],
        {
            "sdpa: dsink of the first row of the batch only": "d_sink[0].sum(dim=1) if",
        },
    ),
    *faults(
        MATH,
        "-torch.exp((sink - lse_s).clamp(max=0)) * delta",
        ["sdpa"],
        {
            "sdpa: dsink without the weight of the sink": "-torch.ones_like(lse_s) * delta",
        },
    ),
    *faults(
        OP,
        "None if tensors[3] is None else d_sinks",
        ["sdpa"],
        {
            "sdpa: dsink is not handed out": "None if tensors[3] is None else 0 * d_sinks",
        },
    ),
    *faults(
        MATH,
        "p.pack(lse).contiguous()",
        ["sdpa"],
        {
            "sdpa: dq, dk and dv from weights without the sink": "torch_ops.forward(p.piece)[1]",
        },
    ),
    *faults(
        MATH,
        "dk[:, :, columns] += dk_b",
        ["sdpa"],
        {
            "sdpa: the gradient of a key comes from its last block": "dk[:, :, columns] = dk_b",
        },
    ),
    *faults(
        MATH,
        "share = share if p.seeing is None else share * p.seeing",
        ["sdpa extremes"],
        {
            "sdpa: blind rows get the mean of the values": "share = share + 0",
        },
    ),
    *faults(
        BLOCKS,
        "mask.repeat(1, 1, num_heads // num_kv_heads, 1)",
        ["sdpa"],
        {
            "sdpa: packed rows get each other's mask": "mask.repeat_interleave(num_heads // num_kv_heads, dim=2)",
        },
    ),
    *faults(
        BLOCKS,
        "return tensor.reshape(batch, num_heads, rows * num_kv_heads // num_heads, *tensor.shape[3:])",
        ["sdpa"],
        {
            "sdpa: packed heads in reverse": (
                "return tensor.reshape(batch, num_heads, rows * num_kv_heads // num_heads, *tensor.shape[3:]).flip(1)"
            ),
        },
    ),
    *faults(
        BLOCKS,
        "v.left >= ahead + v.q_length - 1",
        ["sdpa"],
        {
            "sdpa: a window is dropped that hides one key": "v.left >= ahead + v.q_length - 2",
        },
    ),
    *faults(
        BLOCKS,
        "v.right >= v.kv_length - 1 - ahead",
        ["sdpa"],
        {
            "sdpa: a bound forwards is dropped that hides one key": "v.right >= v.kv_length - 2 - ahead",
        },
    ),
    *faults(
        BLOCKS,
        "v.with_(right=None).is_full and v.q_offset == v.kv_offset and",
        ["sdpa"],
        {
            "sdpa: a later query is taken for the first": "v.with_(right=None).is_full and",
        },
    ),
    *faults(
        BLOCKS,
        "isinstance(v.q_offset, Tensor) or call.bias is not None or",
        ["sdpa"],
        {
            "sdpa: a bias is forgotten where all else is causal": "isinstance(v.q_offset, Tensor) or",
        },
    ),
)
