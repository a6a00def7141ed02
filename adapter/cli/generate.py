"""sinkhold generate: text or token ids from a checkpoint, run through the adapter."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer, PreTrainedModel, TextStreamer

from ..backends import registry
from .console import working
from .load import BackendOption, DtypeOption, PathArgument, TrustOption, check_divides, check_path, load_model
from .ranks import TpOption, is_first, needs_ranks, run_as_ranks


def generate(
    context: typer.Context,
    path: PathArgument,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The text to continue.")] = None,
    prompt_ids: Annotated[
        str | None,
        typer.Option("--prompt-ids", metavar="IDS", help="Token ids to continue: 1,2,3. Needs no tokenizer."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="How many tokens at most.")] = 64,
    backend: BackendOption = registry.AUTO,
    dtype: DtypeOption = "auto",
    trust_remote_code: TrustOption = False,
    tp: TpOption = 1,
) -> None:
    """Continue a prompt, greedily. Text is streamed to a terminal; token ids are printed as 1,2,3."""
    if (prompt is None) == (prompt_ids is None):
        raise typer.BadParameter("give exactly one of --prompt and --prompt-ids", param_hint="--prompt")
    check_path(path)
    ids = _parse(prompt_ids) if prompt_ids is not None else []
    tokenizer = _tokenizer(path, trust_remote_code) if prompt is not None else None
    if needs_ranks(tp):
        check_divides(path, tp, trust_remote_code)
        run_as_ranks(tp, context)
    with working("loading"):
        model = load_model(path, backend, dtype, trust_remote_code, tp)
    if not model.can_generate():
        raise typer.BadParameter(f"{type(model).__name__} does not generate", param_hint="PATH")
    given = tokenizer(prompt, return_tensors="pt") if tokenizer is not None else _inputs(ids, model)
    text = _continue(model, tokenizer, given, max_new_tokens)
    if is_first():
        typer.echo(text, nl=False)


def _continue(model: PreTrainedModel, tokenizer: Any, given: Any, max_new_tokens: int) -> str:
    """The continuation with its newline; empty when it was streamed already."""
    streams = tokenizer is not None and sys.stdout.isatty() and is_first()
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if streams else None
    given = {name: tensor.to(model.device) for name, tensor in given.items()}
    made = model.generate(**given, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
    new = made[0, given["input_ids"].shape[1] :].tolist()
    if streams:
        return ""
    text = tokenizer.decode(new, skip_special_tokens=True) if tokenizer is not None else ",".join(map(str, new))
    return f"{text}\n"


def _parse(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of token ids like 1,2,3", param_hint="--prompt-ids")
    return [int(part) for part in parts]


def _inputs(ids: list[int], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    size = model.get_input_embeddings().num_embeddings
    if max(ids) >= size:
        raise typer.BadParameter(f"{max(ids)} is not below the vocabulary's size, {size}", param_hint="--prompt-ids")
    tensor = torch.tensor([ids])
    return {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}


def _tokenizer(path: str, trust_remote_code: bool) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise typer.BadParameter(
            f"the checkpoint has no tokenizer that loads ({reason}); use --prompt-ids 1,2,3", param_hint="--prompt"
        ) from error
