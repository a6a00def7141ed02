"""A backend of your own: what it must have, the contract that it must pass, and a model that runs on it.

A package offers its backend by an entry point, so that users name it and nothing else:

    [project.entry-points."sinkhold.backends"]
    lse = "my_package.backend:LogSumExp"
"""

from __future__ import annotations

from collections import Counter

import torch
import transformers

import adapter
from adapter.backends import contract, registry
from adapter.backends.call import Attended, AttentionCall
from adapter.backends.capability import Capability, Feature


class LogSumExp:
    """Attention without the sink, times sigmoid(lse - sink): the same softmax, since a sink only adds to its sum."""

    name = "lse"
    capability = Capability(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.float64}),
        features=Feature.SINK_PER_HEAD | Feature.CAUSAL | Feature.WINDOW | Feature.PADDING | Feature.DENSE_MASK,
    )

    def unavailable(self) -> str | None:
        """None: torch is all it needs."""
        return None

    def attend(self, call: AttentionCall) -> Attended:
        """Compute one call; what a call may ask for is what `capability` says, nothing else ever arrives."""
        group = call.query.shape[1] // call.key.shape[1]
        key, value = (t.repeat_interleave(group, dim=1) for t in (call.key, call.value))
        logits = call.scale * call.query @ key.transpose(2, 3)
        visible = call.visibility.to_bool(logits.device)
        if visible is not None:
            logits = logits.masked_fill(~visible, float("-inf"))
            value = value.masked_fill(~visible.expand_as(logits).any(dim=2)[..., None], 0)
        lse = logits.logsumexp(dim=3, keepdim=True)
        output = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0)) @ value
        if call.sinks is not None:
            output = output * torch.sigmoid(lse - call.sinks[:, None, None].to(lse.dtype))
        return Attended(output.transpose(1, 2).contiguous())


class Deaf(LogSumExp):
    """The commonest fault: it accepts a sink and ignores it."""

    name = "deaf"

    def attend(self, call: AttentionCall) -> Attended:
        """Everything but the sink."""
        call.sinks = None
        return super().attend(call)


def count_failures(backend: registry.Backend, limit: int = 40) -> Counter[str]:
    """How many of the first cases of the contract pass and fail."""
    outcomes: Counter[str] = Counter()
    for case in contract.cases(backend.capability, device="cpu")[:limit]:
        outcomes["passed" if all(m.passed for m in contract.measure(backend, case)) else "failed"] += 1
    return outcomes


def main() -> None:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval().requires_grad_(False)

    print("contract of 'lse':", dict(count_failures(LogSumExp())))
    registry.register(LogSumExp())
    with adapter.adapted(model, backend="lse"):
        model(input_ids=torch.arange(3, 27)[None])
        print("ran on:", adapter.report(model).layers[0].backends)

    # Nobody has to run the contract: a backend is proven on this machine before its first use.
    registry.register(Deaf())
    try:
        with adapter.adapted(model, backend="deaf", recording=False):
            model(input_ids=torch.arange(3, 27)[None])
    except adapter.ProofError as error:
        print(error)
    else:
        raise SystemExit("a backend that ignores the sink was used")


if __name__ == "__main__":
    main()
