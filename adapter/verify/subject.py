"""The model under verification: its input, its forwards under the adapter and under eager, and its layers' calls."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..attention import Attention
from ..interface import IMPLEMENTATION
from ..masks import LazyMask
from .captured import Captured, capturing
from .verification import Skip

Result = TypeVar("Result")

_SHORTEST, _LONGEST_WINDOW, _STEPS = 24, 256, 4
_GROUPS = "num_key_value_groups"
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Greatest relative error that passes, by the dtype of the model: some roundings of the half-precision ones."""
LARGEST = 2 * 1024**3
"""Bytes of parameters up to which a model is copied or written to disk."""


class Subject:
    """An adapted model in eval mode.

    Args:
        model: the model.
        input_ids: [batch, length]; None draws two rows that reach over the edge of the model's window.
        tolerance: greatest relative error; None takes it from TOLERANCES, and measures the noise of half precision.
    """

    def __init__(self, model: nn.Module, input_ids: Tensor | None, tolerance: float | None) -> None:
        self.model = model
        parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
        self.device = parameter.device if parameter is not None else torch.device("cpu")
        dtype = parameter.dtype if parameter is not None else torch.float32
        self.tolerance = TOLERANCES.get(dtype, 2e-2) if tolerance is None else tolerance
        config = getattr(model, "config", None)
        self.text_config: Any = config.get_text_config() if config is not None else None
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.layers = [m for m in model.modules() if isinstance(m, Attention)]
        self.size = sum(p.numel() * p.element_size() for p in model.parameters())
        self._measures_noise = tolerance is None and dtype in (torch.float16, torch.bfloat16) and self._can_be_copied()
        self._given = input_ids
        self._parameters = inspect.signature(model.forward).parameters

    @functools.cached_property
    def ids(self) -> Tensor:
        """[batch, length] int64 on the model's device."""
        if self._given is not None:
            return self._given.to(self.device)
        windows = [w for w in (declared_window(a) for a in self.layers) if w is not None and w <= _LONGEST_WINDOW]
        longest = getattr(self.text_config, "max_position_embeddings", None) or 2 * _LONGEST_WINDOW
        return self.draw(2, min(max([_SHORTEST, *(w + 5 for w in windows)]), longest), seed=1)

    @property
    def prompt_length(self) -> int:
        """How many of `ids` are the prompt; the others are decoded."""
        return max(1, self.ids.shape[1] - _STEPS)

    def draw(self, batch: int, length: int, seed: int) -> Tensor:
        """Random tokens, none of which the config gives a special meaning."""
        size = getattr(self.text_config, "vocab_size", None) or 100
        config = getattr(self.model, "config", None)
        special = _special(config) | _special(self.text_config)
        pool = torch.tensor([i for i in range(min(size, 1000)) if i not in special])
        picks = torch.randint(len(pool), (batch, length), generator=torch.Generator().manual_seed(seed))
        return pool[picks].to(self.device)

    def forward(self, ids: Tensor, mask: Tensor | None = None, cache: Any = None, *, use_cache: bool = False) -> Any:
        """One forward without gradients; an encoder-decoder model gets `ids` in its decoder.

        Args:
            ids: [batch, length].
            mask: [batch, length] int64, 1 where the token is real.
            cache: what an earlier forward returned.
            use_cache: keep a cache.
        """
        inputs: dict[str, Any] = {"input_ids": ids}
        if mask is not None:
            inputs["attention_mask"] = mask
            if "position_ids" in self._parameters:
                inputs["position_ids"] = mask.cumsum(-1).sub(1).clamp(min=0)
        if self.is_encoder_decoder:
            inputs = {f"decoder_{name}": value for name, value in inputs.items()}
            inputs["input_ids"] = self.ids[:1].expand(ids.shape[0], -1)
        if getattr(self.text_config, "use_cache", None) is not None:
            inputs["use_cache"] = use_cache
        if cache is not None:
            # transformers 5.24 renamed the argument
            inputs["cache" if "cache" in self._parameters else "past_key_values"] = cache
        with torch.no_grad():
            return self.model(**inputs)

    def logits(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, length, vocabulary] without a cache; the last hidden state of a model without a head."""
        return scores(self.forward(ids, mask))

    @functools.cached_property
    def own(self) -> Tensor:
        """Logits of `ids` through the adapter."""
        return self.logits(self.ids)

    @functools.cached_property
    def eager(self) -> Tensor:
        """Logits of `ids` with transformers' own eager attention."""
        return self.under_eager(lambda: self.logits(self.ids))

    def _can_be_copied(self) -> bool:
        offloaded = any(hasattr(m, "_hf_hook") for m in self.model.modules())
        return self.size <= LARGEST and not offloaded and not getattr(self.model, "is_quantized", False)

    @functools.cached_property
    def precise(self) -> Tensor | None:
        """Eager logits of a fp32 copy of a half-precision model; None for other models and for large ones."""
        if not self._measures_noise:
            return None
        twin = Subject(copy.deepcopy(self.model).float(), self.ids, self.tolerance)
        return twin.eager

    @functools.cached_property
    def limit(self) -> float:
        """Greatest relative error of logits: the tolerance, or twice that of half-precision eager against fp32."""
        noise = 0.0 if self.precise is None else self.error(self.eager, self.precise)
        return max(self.tolerance, 2 * noise)

    def error(self, ours: Tensor, theirs: Tensor) -> float:
        """The relative error of logits; in half precision that of the median token.

        A rounding that sends one token to another expert moves that token's logits as a whole, under eager too.
        """
        if not self._measures_noise:
            return relative(ours, theirs)
        tokens = (ours.double() - theirs.double()).abs().amax(dim=-1)
        return float((tokens.median() / theirs.double().abs().max()).item())

    def under_eager(self, run: Callable[[], Result]) -> Result:
        """`run()` while the adapted configs say eager."""
        calls = self.prefill.values() if (getattr(self.model, "tp_size", None) or 1) > 1 else ()
        with _eager(self.model), _groups_of(calls):
            return run()

    @functools.cached_property
    def prefill(self) -> dict[Attention, Captured]:
        """Each layer's call in a forward of `ids`."""
        with capturing(self.model) as found:
            self.logits(self.ids)
        return found

    @functools.cached_property
    def decode(self) -> dict[Attention, Captured]:
        """Each layer's call of the last token of `ids`, the others in the cache; raises Skip without a cache."""
        cache = self.cache_of(self.ids[:, :-1])[1]
        with capturing(self.model) as found:
            self.forward(self.ids[:, -1:], cache=cache, use_cache=True)
        return {attn: call for attn, call in found.items() if call.query.shape[2] == 1}

    def cache_of(self, ids: Tensor) -> tuple[Tensor, Any]:
        """Logits and cache of a prefill."""
        output = self.forward(ids, use_cache=True)
        cache = _cache(output)
        if cache is None:
            raise Skip("the model keeps no cache")
        return scores(output), cache

    def stepwise(self) -> Tensor:
        """Logits of `ids` from a prefill and single tokens; raises Skip where there is no cache."""
        prompt = self.prompt_length
        first, cache = self.cache_of(self.ids[:, :prompt])
        collected = [first]
        for i in range(prompt, self.ids.shape[1]):
            output = self.forward(self.ids[:, i : i + 1], cache=cache, use_cache=True)
            cache = _cache(output)
            collected.append(scores(output))
        return torch.cat(collected, dim=1)


def scores(output: Any) -> Tensor:
    """The logits of a model's output, or its last hidden state."""
    for name in ("logits", "last_hidden_state"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise Skip(f"the model returns a {type(output).__name__} without logits or a last hidden state")


def _cache(output: Any) -> Any:
    found = getattr(output, "cache", None)
    return getattr(output, "past_key_values", None) if found is None else found


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Greatest difference over the greatest value; NaN where either holds one."""
    ours, theirs = ours.double(), theirs.double()
    scale = theirs.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float(((ours - theirs).abs().max() / scale).item())


def declared_window(attn: Attention) -> int | None:
    """Tokens of a layer's window, by what its module passes to the interface or calls sliding_window."""
    window = attn.registered.get("sliding_window", getattr(attn.owner, "sliding_window", None))
    return window if isinstance(window, int) and not isinstance(window, bool) and window > 0 else None


def masked_left(mask: Any) -> int | None:
    """How far back a lazy mask lets a query see; None where it is unlimited or not known."""
    return mask.visibility.left if isinstance(mask, LazyMask) else None


def _special(config: Any) -> set[int]:
    found: set[int] = set()
    for name, value in vars(config).items() if config is not None else ():
        if name.endswith("token_id"):
            found.update(v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, int))
    return found


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules())}
    plain = [c for c in configs.values() if isinstance(c, PreTrainedConfig)]
    changed = [c for c in plain if c._attn_implementation_internal == IMPLEMENTATION]
    try:
        for config in changed:
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config in changed:
            config._attn_implementation_internal = IMPLEMENTATION


@contextmanager
def _groups_of(calls: Iterable[Captured]) -> Iterator[None]:
    """Eager repeats key heads as often as in the whole model; a rank that shares a key head with others has fewer
    query heads for it."""
    groups = {call.attn.owner: call.query.shape[1] // call.key.shape[1] for call in calls}
    before = {o: getattr(o, _GROUPS) for o in groups if isinstance(getattr(o, _GROUPS, None), int)}
    try:
        for owner in before:
            setattr(owner, _GROUPS, groups[owner])
        yield
    finally:
        for owner, count in before.items():
            setattr(owner, _GROUPS, count)
