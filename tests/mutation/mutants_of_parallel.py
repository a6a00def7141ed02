"""Faults in what each rank holds, sends and sees."""

from __future__ import annotations

from .apply import faults

PLAN, STYLES = "adapter/parallel/plan.py", "adapter/parallel/styles.py"
LOADING, SHARING, AGREEMENT = (
    "adapter/parallel/loading.py",
    "adapter/parallel/sharing.py",
    "adapter/parallel/agreement.py",
)
SHARDS, PROBE = "adapter/shards.py", "adapter/verify/parallel.py"
RING, ULYSSES = "adapter/parallel/ring.py", "adapter/parallel/ulysses.py"
CONTEXT, CALL = "adapter/parallel/context.py", "adapter/parallel/call.py"
SEQUENCE, BATCH = "adapter/parallel/sequence.py", "adapter/parallel/batch.py"
LAYERS, LOCALITY, INPUTS = "adapter/parallel/layers.py", "adapter/parallel/locality.py", "adapter/parallel/inputs.py"

HEADS = "tensor parallel gpt_oss"

MUTANTS = (
    *faults(
        PLAN,
        'if count % size:\n                return f"{count} query heads',
        ["plan"],
        {"plan: heads that do not divide pass": 'if False:\n                return f"{count} query heads'},
    ),
    *faults(
        PLAN,
        "if count % size and size % count:",
        ["plan"],
        {
            "plan: any number of key heads passes": "if False:",
            "plan: key heads must divide by the ranks": "if count % size:",
        },
    ),
    *faults(
        PLAN,
        'if count % size:\n                return f"{count} experts',
        ["plan"],
        {"plan: experts that do not divide pass": 'if False:\n                return f"{count} experts'},
    ),
    *faults(PLAN, "if width % size:", ["plan"], {"plan: a part of a packed feature passes": "if False:"}),
    *faults(
        PLAN,
        "for n in range(1, limit + 1)",
        ["plan"],
        {"plan: the largest size is not named": "for n in range(1, limit)"},
    ),
    *faults(
        PLAN,
        "if sinks != split:",
        ["plan"],
        {
            "plan: sinks without their heads pass": "if split and not sinks:",
            "plan: heads without their sinks pass": "if sinks and not split:",
        },
    ),
    *faults(
        PLAN,
        'wanted |= {f"{heads.path}.{heads.sink}": "colwise", heads.path: LOCAL}',
        [HEADS],
        {
            "plan: the sinks stay whole": "wanted |= {heads.path: LOCAL}",
            "plan: the attention sees the sinks of all ranks": 'wanted |= {f"{heads.path}.{heads.sink}": "colwise"}',
        },
    ),
    *faults(
        PLAN,
        "whole = any(h.num_kv_heads % ranks for h in same)",
        [HEADS],
        {"plan: key heads are cut": "whole = False"},
    ),
    *faults(
        PLAN,
        "(parts.value, heads.v_head_dim)",
        ["tensor parallel mimo_v2_flash"],
        {"plan: value heads are as wide as key heads": "(parts.value, heads.head_dim)"},
    ),
    *faults(
        PLAN,
        '"replicated_with_grad_allreduce"',
        ["tensor parallel flint"],
        {"plan: a norm learns from one rank's heads": '"replicate"'},
    ),
    *faults(
        STYLES,
        "start = mesh.get_local_rank() * heads // mesh.size() * head_dim",
        [HEADS],
        {
            "styles: every rank uses the first key head": "start = 0",
            "styles: key heads are dealt out in turn": "start = mesh.get_local_rank() % heads * head_dim",
            "styles: key heads in reverse": (
                "start = (mesh.size() - 1 - mesh.get_local_rank()) * heads // mesh.size() * head_dim"
            ),
        },
    ),
    *faults(
        STYLES,
        "dist.all_reduce(grad, group=ctx.group)",
        [HEADS],
        {"styles: a shared key head learns from one rank's queries": "pass"},
    ),
    *faults(
        SHARING,
        "(self._shared, *args[1:])",
        ["tensor parallel flint"],
        {"sharing: an input learns nothing": "(self._shared.detach(), *args[1:])"},
    ),
    *faults(
        SHARING,
        "== _COLUMN_WISE",
        [HEADS],
        {"sharing: the output projection gets its part as the whole": "is not None"},
    ),
    *faults(
        LOADING,
        "if not any(is_kv_style(style) for style in self.plan.rules.values()):",
        [HEADS],
        {"loading: a static cache has room for cut heads": "if True:"},
    ),
    *faults(
        LOADING,
        'return "all_to_all" if given == "auto" and chosen in (None, "eager") else given',
        ["tensor parallel openai_privacy_filter"],
        {"loading: tokens reach experts that know no other ranks": "return given"},
    ),
    *faults(
        LOADING,
        "if load.plan.expert_parallel and wanted.ep_size == 1:",
        ["shards"],
        {"loading: every rank holds all experts": "if False:"},
    ),
    *faults(
        AGREEMENT,
        "if failed and error is None:",
        ["agreement"],
        {"agreement: the others go on": "if False:", "agreement: a rank loses its own error": "if failed:"},
    ),
    *faults(
        AGREEMENT,
        "rank, text = failed[0]",
        ["agreement"],
        {"agreement: the wrong rank is blamed": "rank, text = 0, failed[0][1]"},
    ),
    *faults(
        SHARDS,
        "held + local.numel() * size",
        ["shards"],
        {"shards: a rank says it holds all": "held + parameter.numel() * size"},
    ),
    *faults(
        SHARDS,
        "min(start, heads), min(start, heads) + count, used)",
        ["shards"],
        {"shards: every rank says it holds the first heads": "0, count, used)"},
    ),
    *faults(
        PROBE,
        "if not all(torch.equal(other, whole[0]) for other in whole):",
        ["probe"],
        {"probe: different sinks pass": "if False:"},
    ),
    *faults(
        PROBE,
        "relative(other, logits[0]) for other in logits)",
        ["probe"],
        {"probe: only the first rank's logits are compared": "relative(other, logits[0]) for other in logits[:1])"},
    ),
    *faults(
        PROBE,
        'sinks.full_tensor() if hasattr(sinks, "full_tensor") else sinks',
        ["probe"],
        {"probe: parts of the sinks are compared": 'sinks.to_local() if hasattr(sinks, "full_tensor") else sinks'},
    ),
    *faults(
        RING,
        "total = torch.logaddexp(lse, its_lse)",
        ["ring"],
        {"ring: the larger block's sum stands for both": "total = torch.maximum(lse, its_lse)"},
    ),
    *faults(
        RING,
        'total.masked_fill(total == float("-inf"), 0)',
        ["ring"],
        {"ring: rows without a key are no numbers": "total"},
    ),
    *faults(
        RING,
        "torch.sigmoid(lse - sink)",
        ["ring"],
        {
            "ring: the output gets the sink's share": "torch.sigmoid(sink - lse)",
            "ring: the sink is added in the log-sum-exp alone": "torch.ones_like(lse - sink)",
        },
    ),
    *faults(
        RING,
        "return -(weight * delta)",
        ["ring"],
        {
            "ring: dsink has the wrong sign": "return (weight * delta)",
            "ring: dsink is lost": "return 0 * (weight * delta)",
        },
    ),
    *faults(
        RING,
        "(-call.query, -call.scale)",
        ["ring"],
        {"ring: a negative scale loses its sign": "(call.query, -call.scale)"},
    ),
    *faults(RING, "dkv[1].add_(found[2])", ["ring"], {"ring: dv of other ranks is lost": "dkv[1].copy_(found[2])"}),
    *faults(
        ULYSSES,
        "t.repeat_interleave(copies, dim=1)",
        ["ulysses"],
        {"ulysses: key heads go to other query heads": "t.repeat(1, copies, 1, 1)"},
    ),
    *faults(
        ULYSSES,
        "back.view(size, batch, length, heads, -1).permute(1, 2, 0, 3, 4)",
        ["ulysses"],
        {
            "ulysses: heads come back in another order": (
                "back.view(size, batch, length, heads, -1).flip(0).permute(1, 2, 0, 3, 4)"
            )
        },
    ),
    *faults(
        ULYSSES,
        "return _all_to_all(grads[0], ctx.group), None",
        ["ulysses"],
        {"ulysses: gradients stay on the rank": "return grads[0], None"},
    ),
    *faults(
        ULYSSES,
        "and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)",
        ["dealing"],
        {"ulysses: query heads of two groups meet": ""},
    ),
    *faults(
        ULYSSES,
        "return num_heads % ranks == 0 and (num_kv_heads",
        ["dealing"],
        {"ulysses: a part of a query head": "return True and (True or num_kv_heads"},
    ),
    *faults(
        SEQUENCE,
        "documents[:, start : start + self.length]",
        ["context"],
        {"sequence: queries are of the first rank's documents": "documents[:, : self.length]"},
    ),
    *faults(
        SEQUENCE,
        "jumps.cumsum(-1), (1, 0))",
        ["context"],
        {"sequence: documents begin one token early": "jumps.cumsum(-1), (0, 1))"},
    ),
    *faults(
        SEQUENCE, "right=visibility.right,", ["context"], {"sequence: tokens see what comes after them": "right=None,"}
    ),
    *faults(
        SEQUENCE,
        "None if bool(padding.all()) else padding",
        ["context"],
        {"sequence: padding is forgotten where any token is real": "None if bool(padding.any()) else padding"},
    ),
    *faults(
        BATCH,
        "value[:, rank * piece : (rank + 1) * piece]",
        ["context"],
        {
            "batch: every rank gets the first tokens": "value[:, :piece]",
            "batch: ranks in reverse": "value[:, (size - 1 - rank) * piece : (size - rank) * piece]",
        },
    ),
    *faults(
        BATCH,
        "piece = -(-length // size)",
        ["context"],
        {"batch: the last tokens are cut off": "piece = length // size"},
    ),
    *faults(
        CONTEXT,
        "SPREAD.set(None)",
        ["context"],
        {"context: what comes after a forward is spread too": "pass"},
    ),
    *faults(
        CONTEXT,
        "if text is not None:",
        ["agreement on context"],
        {"context: the others go on when a rank refuses": "if False:"},
    ),
    *faults(
        CONTEXT,
        "if its != method:",
        ["agreement on context"],
        {"context: ranks with different methods go on": "if False:"},
    ),
    *faults(
        CONTEXT,
        "if call.visibility.kv_length != self.size * call.key.shape[2]:",
        ["part of a model"],
        {"context: a part of the model sees a part of the tokens": "if False:"},
    ),
    *faults(
        CONTEXT,
        'if call.visibility.documents is not None and kwargs.get("position_ids") is None:',
        ["refused inputs"],
        {"context: a layer that may mix documents passes": "if False:"},
    ),
    *faults(
        CALL,
        "if unfit:",
        ["refused inputs"],
        {"call: dropout on parts of rows passes": "if False:"},
    ),
    *faults(
        LAYERS,
        "if finding.sink.kind is SinkKind.PER_TOKEN:",
        ["refused models"],
        {"layers: sinks of each token pass": "if False:"},
    ),
    *faults(LAYERS, "if rewrites_mask(module):", ["refused models"], {"layers: a changed mask passes": "if False:"}),
    *faults(
        LAYERS,
        'if getattr(getattr(model, "config", None), "is_encoder_decoder", False):',
        ["refused models"],
        {"layers: two sequences pass": "if False:"},
    ),
    *faults(
        LOCALITY,
        "if compare.differs(output):",
        ["refused models"],
        {"locality: tokens that meet elsewhere pass": "if False:"},
    ),
    *faults(
        SEQUENCE,
        "if visibility.chunk_size is not None:",
        ["refused models"],
        {"sequence: chunks count from each rank's first token": "if False:"},
    ),
    *faults(
        SEQUENCE,
        "if visibility.dense is not None:",
        ["refused models"],
        {"sequence: a mask of single values is that of each rank": "if False:"},
    ),
    *faults(
        INPUTS,
        'if given.keys() & {*_CACHES} or given.get("use_cache"):',
        ["refused inputs"],
        {"inputs: a cache of a part passes": "if False:"},
    ),
    *faults(INPUTS, "    if lengths:", ["refused inputs"], {"inputs: lengths of documents pass": "    if False:"}),
    *faults(
        INPUTS,
        "(not isinstance(value, Tensor) or value.shape[1:] != (tokens.shape[1],))",
        ["refused inputs"],
        {"inputs: a mask for other tokens passes": "False"},
    ),
    *faults(
        INPUTS,
        "if not shifts_labels(model):",
        ["refused inputs"],
        {"inputs: a mean over a part passes": "if False:"},
    ),
    *faults(INPUTS, "    if missing:", ["refused inputs"], {"inputs: labels of a part pass": "    if False:"}),
    *faults(
        INPUTS,
        'if given.get("output_router_logits",',
        ["refused inputs"],
        {"inputs: the router's loss passes": 'if False and given.get("output_router_logits",'},
    ),
)
