"""Loading over several ranks: the keywords of from_pretrained with the derived plan in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import transformers
from torch import nn

from ..blueprint import meta_model
from ..errors import ParallelError
from ..pipeline import check_stages
from .agreement import Agreement, start_ranks, world_size
from .plan import LOCAL, Plan, derive_plan
from .saving import save_as_one
from .sharing import share_inputs
from .styles import is_kv_style

_PARALLEL_KEYWORDS = ("tp_plan", "tp_size", "distributed_config")


@dataclass
class ParallelLoad(Agreement):
    """One load: `kwargs` for transformers' from_pretrained, and what has to be done to the model after it.

    As a context manager it makes all ranks fail when one does.
    """

    kwargs: dict[str, Any]
    plan: Plan | None = None
    ranks: int = 1

    def loaded(self, model: nn.Module) -> None:
        """Finish the model that was loaded with `kwargs`."""
        if getattr(model, "_device_mesh", None) is not None:
            save_as_one(model)
        if self.plan is None:
            return
        share_inputs(model, {**(getattr(model, "_tp_plan", None) or {}), **self.plan.rules})
        if not any(is_kv_style(style) for style in self.plan.rules.values()):
            return
        # transformers sizes static caches by the plan; a key projection that does not divide makes it wait for the
        # first keys instead of guessing all heads.
        model._tp_plan = {**(getattr(model, "_tp_plan", None) or {}), "k_proj": "colwise"}  # type: ignore[assignment]


def parallel_load(auto: Any, path: str, kwargs: dict[str, Any]) -> ParallelLoad:
    """Prepare a load; without parallel keywords, or with one rank, `kwargs` come back as they are.

    Args:
        auto: the transformers Auto class that will load.
        path: as for its from_pretrained.
        kwargs: its keywords; `tp_plan`, `tp_size` and `distributed_config` are read.

    Raises:
        ParallelError: the plan and the model do not fit; no weight has been read then.
    """
    if world_size() == 1:
        _check_launched(kwargs)
        return ParallelLoad(dict(kwargs))
    wanted = _distributed_config(kwargs)
    if wanted is None:
        return ParallelLoad(dict(kwargs))
    start_ranks()
    rest = {name: value for name, value in kwargs.items() if name not in _PARALLEL_KEYWORDS}
    load = ParallelLoad({**rest, "distributed_config": wanted}, ranks=wanted.tp_size)
    if getattr(wanted, "pp_size", 1) > 1:
        with load:
            check_stages(meta_model(auto, path, rest))
    if wanted.tp_size == 1 or wanted.tp_plan == {}:
        return load  # an empty plan is transformers' way to ask for no tensor parallelism
    with load:
        _check_styles()
        user = wanted.tp_plan if isinstance(wanted.tp_plan, dict) else None
        experts = None if wanted.ep_size == 1 and wanted.ep_plan is None else wanted.ep_size > 1
        model = meta_model(auto, path, rest)
        load.plan = derive_plan(model, wanted.tp_size, user, experts)
        changes: dict[str, Any] = {"tp_plan": load.plan.rules or "auto"}
        if load.plan.expert_parallel and wanted.ep_size == 1:
            changes |= {"ep_size": wanted.tp_size, "ep_implementation": _dispatch(model, rest, wanted)}
        load.kwargs["distributed_config"] = replace(wanted, **changes)
    return load


def _dispatch(model: Any, kwargs: dict[str, Any], wanted: Any) -> str:
    """How tokens reach their experts. Masking routes by an id past the last expert, as 'auto' does in inference, is
    not in the contract of a model's own experts forward; an exchange of tokens calls it with its own ids only."""
    chosen = kwargs.get("experts_implementation") or getattr(model.config, "_experts_implementation", None)
    given: str = wanted.ep_implementation
    return "all_to_all" if given == "auto" and chosen in (None, "eager") else given


def _check_launched(kwargs: dict[str, Any]) -> None:
    config = kwargs.get("distributed_config")
    given = config.get("tp_size") if isinstance(config, dict) else getattr(config, "tp_size", None)
    sizes = [size for size in (kwargs.get("tp_size"), given) if isinstance(size, int) and size > 1]
    if sizes:
        raise ParallelError(
            f"{sizes[0]} ranks are asked for, and this process is the only one",
            why="each rank is a process of its own",
            fix=f"start the script with torchrun --nproc-per-node {sizes[0]} script.py",
        )


def _distributed_config(kwargs: dict[str, Any]) -> Any:
    config_class = getattr(transformers, "DistributedConfig", None)
    given = kwargs.get("distributed_config")
    if given is not None:
        if any(kwargs.get(name) is not None for name in ("tp_plan", "tp_size")):
            raise ParallelError(
                "distributed_config is given together with tp_plan or tp_size",
                why="one of the two would be ignored",
                fix="put tp_plan and tp_size into distributed_config",
            )
        return config_class.from_dict(given) if isinstance(given, dict) and config_class else given
    if kwargs.get("tp_plan") is None and kwargs.get("tp_size") is None:
        return None
    if config_class is None:
        raise ParallelError("this transformers has no DistributedConfig", fix="install transformers 5.24 or newer")
    return config_class(tp_plan=kwargs.get("tp_plan"), tp_size=kwargs.get("tp_size"))


def _check_styles() -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    if LOCAL not in ALL_PARALLEL_STYLES:
        raise ParallelError(
            f"transformers {transformers.__version__} cannot split a sink: it has no tensor-parallel style {LOCAL!r}",
            why="the attention would get a sink that is spread over the ranks as if it were whole",
            fix="install transformers 5.24 or newer",
        )
