"""Models that accelerate places or offloads: the hooks stay, and the sinks come from wherever the hooks bring them."""

from __future__ import annotations

import accelerate
import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module, remove_hook_from_submodules
from safetensors.torch import load_file, save_file

import adapter
from tests.adapter.comparison import decode, logits, new_cache, relative
from tests.families import FAMILIES, build, save, set_sinks, tokens

IDS = tokens(2, 13)
CPU = torch.device("cpu")
TOLERANCE = 1e-5
# sinks on every layer (twice), on the windowed layers only, and computed for each token
NAMES = ("gpt_oss", "granite_swa", "mimo_v2_flash", "inkling2")


@pytest.fixture(scope="module", params=NAMES)
def source(request, tmp_path_factory):
    return make_source(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    return make_source("gpt_oss", tmp_path_factory)


class Source:
    """A checkpoint of one family, and what eager attention computes from it."""

    def __init__(self, name, folder):
        save(name, folder)
        self.folder, self.auto = folder, FAMILIES[name].auto
        model = self.load()
        self.eager = run(model)
        self.size = sum(p.numel() * p.element_size() for p in model.parameters())

    def load(self, **kwargs):
        kwargs.setdefault("attn_implementation", "eager")
        return getattr(transformers, self.auto).from_pretrained(self.folder, **kwargs).eval()

    def load_adapted(self, **kwargs):
        return getattr(adapter, self.auto).from_pretrained(self.folder, **kwargs).eval()

    def empty(self):
        config = transformers.AutoConfig.from_pretrained(self.folder)
        with accelerate.init_empty_weights():
            model = getattr(transformers, self.auto).from_config(config, attn_implementation="eager").eval()
        model.tie_weights()
        return model

    def memory(self):
        """Room for a part of the model, some layers with sinks among it."""
        return {"cpu": self.size * 8 // 10}


def make_source(name, tmp_path_factory):
    return Source(name, tmp_path_factory.mktemp(name))


def run(model):
    with torch.no_grad():
        return logits(model, input_ids=IDS)


def hooks_of(model):
    return {
        name: (module._hf_hook, module.__dict__["forward"], module._old_forward)
        for name, module in model.named_modules()
        if hasattr(module, "_hf_hook")
    }


def sinks_of(model):
    return {n: p for n, p in model.named_parameters() if n.endswith((".sinks", ".sink_proj.weight"))}


def infer_device_map(model, memory):
    whole = list(model._no_split_modules)
    device_map = accelerate.infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole)
    assert set(device_map.values()) == {"cpu", "disk"}
    return device_map


def load_and_dispatch(model, source, folder):
    device_map = infer_device_map(model, source.memory())
    accelerate.load_checkpoint_and_dispatch(model, source.folder, device_map=device_map, offload_folder=folder)


def cpu_offload(model, folder, memory):
    accelerate.cpu_offload(model, execution_device=CPU)


def disk_offload(model, folder, memory):
    accelerate.disk_offload(model, folder, execution_device=CPU)


def dispatch(model, folder, memory):
    accelerate.dispatch_model(model, infer_device_map(model, memory), main_device="cpu", offload_dir=folder)


def dispatch_whole(model, folder, memory):
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


WAYS = {"cpu_offload": cpu_offload, "disk_offload": disk_offload, "dispatch": dispatch, "whole": dispatch_whole}
ON_META = {"cpu_offload": {True}, "disk_offload": {True}, "dispatch": {True, False}, "whole": {False}}


@pytest.mark.parametrize("adapted_first", [False, True], ids=["dispatched, adapted", "adapted, dispatched"])
@pytest.mark.parametrize("way", WAYS)
def test_a_dispatched_model_keeps_its_hooks_and_computes_what_eager_computes(source, way, adapted_first, tmp_path):
    model = source.load()
    if adapted_first:
        adapter.adapt(model)
    WAYS[way](model, tmp_path, source.memory())
    hooks = hooks_of(model)
    assert hooks
    if not adapted_first:
        report = adapter.adapt(model)
        assert report.recording == "compared at the first forward (weights dispatched or offloaded by accelerate)"
    assert hooks_of(model) == hooks
    on_meta = {name: p.is_meta for name, p in sinks_of(model).items()}
    assert set(on_meta.values()) == ON_META[way]

    assert relative(run(model), source.eager) <= TOLERANCE
    assert {name: p.is_meta for name, p in sinks_of(model).items()} == on_meta
    adapter.restore(model)
    assert hooks_of(model) == hooks
    assert torch.equal(run(model), source.eager)


def load_on_cpu(source, folder):
    return source.load_adapted(device_map={"": "cpu"})


def load_auto(source, folder):
    return source.load_adapted(device_map="auto", max_memory={"cpu": 2 * source.size})


def load_offloaded(source, folder):
    return source.load_adapted(device_map="auto", max_memory=source.memory(), offload_folder=folder)


def load_by_name(source, folder):
    options = {"device_map": "auto", "max_memory": source.memory(), "offload_folder": folder}
    return source.load(attn_implementation="sinkhold", **options)


@pytest.mark.parametrize(
    ("load", "on_meta"),
    [(load_on_cpu, {False}), (load_auto, {False}), (load_offloaded, {True, False}), (load_by_name, {True, False})],
)
def test_a_device_map_loads_an_adapted_model(source, load, on_meta, tmp_path):
    model = load(source, tmp_path)
    hooks = hooks_of(model)
    assert bool(hooks) is (True in on_meta)
    assert {p.is_meta for p in sinks_of(model).values()} == on_meta
    assert relative(run(model), source.eager) <= TOLERANCE
    assert adapter.report(model).sink_layers
    if load is not load_by_name:
        adapter.restore(model)
        assert relative(run(model), source.eager) <= TOLERANCE
    assert hooks_of(model) == hooks


@pytest.mark.parametrize("adapted_first", [False, True], ids=["dispatched, adapted", "adapted, dispatched"])
@pytest.mark.parametrize("name", ["gpt_oss", "granite_swa"])
def test_empty_weights_are_adapted_before_or_after_they_are_loaded(name, adapted_first, tmp_path):
    folder, offload = tmp_path / "checkpoint", tmp_path / "offload"
    source = Source(name, folder)
    model = source.empty()
    if adapted_first:
        report = adapter.adapt(model)
        assert report.recording == "compared at the first forward (weights on the meta device)"
    load_and_dispatch(model, source, offload)
    hooks = hooks_of(model)
    if not adapted_first:
        adapter.adapt(model)
    assert {p.is_meta for p in sinks_of(model).values()} == {True, False}
    assert relative(run(model), source.eager) <= TOLERANCE
    assert adapter.restore(model) is model
    assert hooks_of(model) == hooks != {}
    assert torch.equal(run(model), source.eager)


@pytest.mark.parametrize("name", ["gpt_oss", "mimo_v2_flash"])
def test_decoding_over_offloaded_weights(name, tmp_path):
    source = Source(name, tmp_path / "checkpoint")
    ids = tokens(2, 14)
    plain = source.load()
    with torch.no_grad():
        expected = decode(plain, ids, steps=4, cache=new_cache(plain, "dynamic", 14))
        model = load_offloaded(source, tmp_path / "offload")
        found = decode(model, ids, steps=4, cache=new_cache(model, "dynamic", 14))
    assert relative(found, expected) <= TOLERANCE


def test_an_offloaded_sink_that_changes_is_seen_by_the_next_forward(gpt_oss):
    model, plain = gpt_oss.load(), gpt_oss.load()
    store = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerate.cpu_offload(model, execution_device=CPU, state_dict=store)
    adapter.adapt(model)
    assert relative(run(model), gpt_oss.eager) <= TOLERANCE
    for name, sink in set_sinks(plain, mean=6.0).items():
        store[name].copy_(sink.detach())
    changed = run(plain)
    assert relative(changed, gpt_oss.eager) > 0.01
    assert relative(run(model), changed) <= TOLERANCE


def test_the_report_expects_the_device_that_the_hooks_bring_the_weights_to(gpt_oss):
    model = gpt_oss.load()
    accelerate.cpu_offload(model, execution_device=CPU)
    assert adapter.report(model).layers[0].backends == {"prefill": "sdpa", "decode": "sdpa"}
    model.model.layers[0].self_attn._hf_hook.execution_device = "mps"
    add_hook_to_module(model.model.layers[0].self_attn, ModelHook(), append=True)
    layers = adapter.report(model).layers
    assert layers[0].backends == {"prefill": "eager", "decode": "eager"}
    assert layers[0].refusals["sdpa"] == ["device mps (has cpu, cuda)"]
    assert layers[1].backends == {"prefill": "sdpa", "decode": "sdpa"}


def test_hooks_can_be_removed_from_an_adapted_model(gpt_oss):
    model = gpt_oss.load()
    adapter.adapt(model)
    accelerate.cpu_offload(model, execution_device=CPU)
    remove_hook_from_submodules(model)
    assert not hooks_of(model)
    assert adapter.is_adapted(model)
    assert not any(p.is_meta for p in model.parameters())
    assert relative(run(model), gpt_oss.eager) <= TOLERANCE
    adapter.restore(model)
    assert torch.equal(run(model), gpt_oss.eager)


REFUSAL = r"the sink of this call is on the meta device, the query on cpu"


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "eager", "reference"])
def test_a_sink_whose_hook_is_gone_is_refused(gpt_oss, backend, grad, tmp_path):
    model = gpt_oss.empty()
    load_and_dispatch(model, gpt_oss, tmp_path)
    adapter.adapt(model, backend)
    assert relative(run(model), gpt_oss.eager) <= TOLERANCE
    # The weights came from disk, so that accelerate has nothing to put back; the projections have hooks of their own.
    remove_hook_from_module(model.model.layers[3].self_attn)
    with pytest.raises(adapter.SinkError, match=REFUSAL) as caught, torch.set_grad_enabled(grad):
        logits(model, input_ids=IDS)
    assert "[SINK-201]" in str(caught.value)
    assert "model.layers.3.self_attn, " in str(caught.value)


@pytest.mark.parametrize("adapted_first", [False, True], ids=["loaded, adapted", "adapted, loaded"])
@pytest.mark.parametrize("name", ["gpt_oss", "mimo_v2_flash"])
def test_a_sink_that_accelerate_did_not_find_is_refused(name, adapted_first, tmp_path):
    # accelerate knows none of transformers' renamings: it leaves the sinks of mimo_v2_flash where they are.
    source = Source(name, tmp_path)
    file = tmp_path / "model.safetensors"
    if name == "gpt_oss":
        kept = {key: tensor for key, tensor in load_file(file).items() if key != "model.layers.1.self_attn.sinks"}
        save_file(kept, file, {"format": "pt"})
    model = source.empty()
    if adapted_first:
        adapter.adapt(model)
    accelerate.load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu"})
    if not adapted_first:
        assert adapter.adapt(model).layers[1].sink_device == "meta"
    with pytest.raises(adapter.SinkError, match=REFUSAL) as caught:
        logits(model, input_ids=IDS)
    assert "model.layers.1.self_attn, " in str(caught.value)


def test_a_model_without_any_weights_is_refused(gpt_oss):
    model = gpt_oss.empty().to("meta")
    adapter.adapt(model)
    with pytest.raises(adapter.BackendError, match="no backend can run this layer") as caught:
        logits(model, input_ids=IDS.to("meta"))
    assert "eager: device meta" in str(caught.value)


def test_verify_refuses_weights_that_are_not_in_memory():
    model = build("gpt_oss")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(adapter.AdaptError) as caught:
        adapter.verify(model)
    count = len(list(model.parameters()))
    assert caught.value.what == f"{count} weights are on the meta device: model.embed_tokens.weight, ..."
    assert "all must be in memory" in caught.value.why
    assert not adapter.is_adapted(model)
