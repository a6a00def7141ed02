"""A second reference, written apart from the first: attention and its gradients as sums over single numbers."""

from __future__ import annotations

import math

import numpy as np


def attend(query, key, value, scale, visible, sinks, softcap=None, bias=None):
    """Output [B, Q, H, Dv], all arrays fp64; `visible` [B, H, Q, K] bool, `sinks` [B, H, Q], -inf for none."""
    batch, heads, q_length, _ = query.shape
    group = heads // key.shape[1]
    output = np.zeros((batch, q_length, heads, value.shape[3]))
    for b, h, i in np.ndindex(batch, heads, q_length):
        weights = _weights(query, key, scale, visible, sinks, softcap, bias, b, h, i)
        for j, w in weights.items():
            output[b, i, h] += w * value[b, h // group, j]
    return output


def gradients(query, key, value, scale, visible, sinks, upstream):
    """Gradients of sum(output * upstream) for query, key, value and sinks [B, H, Q], weight by weight."""
    dq, dk, dv, ds = (np.zeros_like(t) for t in (query, key, value, sinks))
    group = query.shape[1] // key.shape[1]
    for b, h, i in np.ndindex(*query.shape[:3]):
        g, up = h // group, upstream[b, i, h]
        weights = _weights(query, key, scale, visible, sinks, None, None, b, h, i)
        gains = {j: float(up @ value[b, g, j]) for j in weights}
        mean = sum(weights[j] * gains[j] for j in weights)
        ds[b, h, i] = -(1 - sum(weights.values())) * mean if weights else 0.0
        for j, w in weights.items():
            dv[b, g, j] += w * up
            slope = w * (gains[j] - mean) * scale
            dq[b, h, i] += slope * key[b, g, j]
            dk[b, g, j] += slope * query[b, h, i]
    return dq, dk, dv, ds


def _weights(query, key, scale, visible, sinks, softcap, bias, b, h, i):
    logits = {}
    for j in range(key.shape[2]):
        if visible[b, h, i, j]:
            logit = scale * math.fsum(query[b, h, i] * key[b, h // (query.shape[1] // key.shape[1]), j])
            logit = logit if softcap is None else softcap * math.tanh(logit / softcap)
            logits[j] = logit if bias is None else logit + bias[b, h, i, j]
    if not logits:
        return {}
    top = max(*logits.values(), sinks[b, h, i])
    total = math.fsum(math.exp(x - top) for x in logits.values()) + math.exp(sinks[b, h, i] - top)
    return {j: math.exp(x - top) / total for j, x in logits.items()}
