"""adapt, restore and adapted: reversible, nested, exception-safe at every step, without growth."""

from __future__ import annotations

import copy
import gc
import io
import sys
import threading

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

import adapter
from adapter.attention import Attention, registered_attention
from adapter.errors import AdaptError, BackendError, CheckpointError, SinkError
from tests.adapter.comparison import logits, relative, under_eager
from tests.families import INSTALLED, build, set_sinks, tokens

adapt_module = sys.modules["adapter.adapt"]  # the package attribute of that name is the function

IDS = tokens(1, 9)


def fingerprint(model):
    """Everything that adapting may touch."""
    configs = {id(m.config): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    return (
        [n for n, _ in model.named_modules()],
        sorted(configs.items()),
        [(n, p._version, p.data_ptr()) for n, p in model.named_parameters()],
        {type(m): sorted(type(m).__dict__) for m in model.modules()},
        sorted(AttentionInterface._global_mapping),
        sorted(AttentionMaskInterface._global_mapping),
        {n: sorted(m.__dict__) for n, m in model.named_modules()},
        [m.training for m in model.modules()],
    )


@pytest.mark.parametrize("name", INSTALLED)
def test_restore_leaves_nothing_behind(name):
    model = build(name)
    before = fingerprint(model)
    adapter.adapt(model)
    assert fingerprint(model) != before
    assert any(isinstance(m, Attention) for m in model.modules())
    assert adapter.restore(model) is model
    assert fingerprint(model) == before


def test_the_context_manager_restores_after_an_exception():
    model = build("gpt_oss")
    before = fingerprint(model)
    with pytest.raises(KeyboardInterrupt), adapter.adapted(model):
        raise KeyboardInterrupt
    assert fingerprint(model) == before


def test_nested_adaptations_are_undone_one_by_one():
    model = build("gpt_oss")
    before = fingerprint(model)
    with adapter.adapted(model):
        with adapter.adapted(model):
            assert adapter.is_adapted(model)
        assert adapter.is_adapted(model)
        logits(model, input_ids=IDS)
    assert not adapter.is_adapted(model)
    assert fingerprint(model) == before


def test_an_adapted_model_keeps_its_backend():
    model = build("gpt_oss")
    adapter.adapt(model, "eager")
    with pytest.raises(AdaptError, match="adapted already, with backend 'eager'"):
        adapter.adapt(model, "sdpa")
    assert set(adapter.adapt(model).layers[0].backends.values()) == {"eager"}


def test_restoring_a_model_that_is_not_adapted_changes_nothing():
    model = build("gpt_oss")
    before = fingerprint(model)
    adapter.restore(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize("step", ["find_layers", "_put", "check_sink_values", "_configs", "record", "report_of"])
@pytest.mark.parametrize("after", [1, 3])
def test_an_exception_at_any_step_leaves_the_model_as_it_was(monkeypatch, step, after):
    model = build("gpt_oss")
    before, original, calls = fingerprint(model), getattr(adapt_module, step), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) >= min(after, 3 if step in ("_put", "check_sink_values") else 1):
            raise RuntimeError("pulled the plug")
        return original(*args, **kwargs)

    monkeypatch.setattr(adapt_module, step, failing)
    with pytest.raises(RuntimeError, match="pulled the plug"):
        adapter.adapt(model)
    monkeypatch.undo()
    assert fingerprint(model) == before


def test_a_layer_that_cannot_run_leaves_the_model_as_it_was():
    model = build("gpt_oss")
    before = fingerprint(model)
    with pytest.raises(BackendError, match=r"backend 'flex' cannot run this layer: .*device cpu"):
        adapter.adapt(model, "flex")
    assert fingerprint(model) == before


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(BackendError, match="there is no backend 'warp'") as caught:
        adapter.adapt(build("gpt_oss"), "warp")
    assert "sdpa" in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sink_that_is_no_number_is_refused(bad):
    model = build("gpt_oss")
    before = fingerprint(model)
    model.model.layers[1].self_attn.sinks.data[2] = bad
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.sinks"):
        adapter.adapt(model)
    assert fingerprint(model)[0] == before[0]


@pytest.mark.parametrize("limit", [float("-inf"), 1e30])
def test_extreme_but_meaningful_sinks_run(limit):
    model = build("gpt_oss")
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(limit)
    with adapter.adapted(model):
        assert logits(model, input_ids=IDS).isfinite().all()


def test_the_parameter_that_the_module_holds_at_the_call_is_what_counts(monkeypatch):
    model = build("gpt_oss")
    layer = model.model.layers[1].self_attn
    original = type(layer).forward

    def lying(self, *args, **kwargs):
        sinks, self.sinks = self.sinks, torch.nn.Parameter(self.sinks + 1)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.sinks = sinks

    lying.__wrapped__ = original
    monkeypatch.setattr(type(layer), "forward", lying)
    report = adapter.adapt(model)
    assert "agree on 4 of 4" in report.recording


def test_a_scale_that_the_run_contradicts_is_refused():
    model = build("gpt_oss")
    adapter.adapt(model)
    model.model.layers[0].self_attn.scaling = 1.0
    with pytest.raises(adapter.CallError, match=r"scaling=1.0, but 0.25 is registered"):
        logits(model, input_ids=IDS)


def test_recording_leaves_random_state_and_modes():
    model = build("gpt_oss").train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    adapter.adapt(model, recording=True)
    assert torch.equal(torch.rand(3), expected)
    adapter.restore(model)
    assert [m.training for m in model.modules()] == modes


def test_recording_is_put_off_where_it_would_be_dear():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(build("gpt_oss").config)
    report = adapter.adapt(model)
    assert report.recording == "compared at the first forward (weights on the meta device)"
    assert report.layers[0].sink_device == "meta"


def test_a_copy_of_an_adapted_model_stands_on_its_own():
    model = build("gpt_oss")
    adapter.adapt(model)
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        attn = registered_attention(layer.self_attn)
        assert attn.owner is layer.self_attn
        assert attn.sinks is layer.self_attn.sinks
    first = logits(model, input_ids=IDS)
    set_sinks(twin, mean=6.0)
    assert torch.equal(logits(model, input_ids=IDS), first)
    assert (logits(twin, input_ids=IDS) - first).abs().max() > 0.01
    adapter.restore(twin)
    assert adapter.is_adapted(model)
    assert not adapter.is_adapted(twin)


def test_an_adapted_model_can_be_pickled():
    model = build("gpt_oss")
    adapter.adapt(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert again.model.layers[0].self_attn.attn.sinks is again.model.layers[0].self_attn.sinks
    assert torch.equal(logits(again, input_ids=IDS), logits(model, input_ids=IDS))


@pytest.mark.parametrize("way", ["copy", "assign", "data", "optimizer", "parameter"])
def test_every_way_of_changing_a_sink_is_seen_by_the_next_forward(way):
    # vllm#57795, sglang#29916, vllm-ascend#16958: a stale copy of the sink after a weight update.
    model = build("gpt_oss")
    adapter.adapt(model)
    before = logits(model, input_ids=IDS)
    state = {k: v + 2.0 if k.endswith("sinks") else v.clone() for k, v in model.state_dict().items()}
    if way in ("copy", "assign"):
        model.load_state_dict(state, assign=way == "assign")
    for layer in model.model.layers:
        attention = layer.self_attn
        if way == "data":
            attention.sinks.data = attention.sinks.data + 2.0
        elif way == "parameter":
            attention.sinks = torch.nn.Parameter(attention.sinks.detach() + 2.0)
    if way == "optimizer":
        sinks = [layer.self_attn.sinks for layer in model.model.layers]
        for sink in sinks:
            sink.grad = torch.full_like(sink, -2.0)
        torch.optim.SGD(sinks, lr=1.0).step()
    after = logits(model, input_ids=IDS)
    assert (after - before).abs().max() > 0.01
    adapter.restore(model)
    assert relative(after, under_eager(model, lambda m: logits(m, input_ids=IDS))) <= 1e-5


def test_functional_call_uses_the_sinks_it_is_given():
    model = build("gpt_oss")
    adapter.adapt(model)
    changed = {n: p.detach() + 2.0 for n, p in model.named_parameters() if n.endswith("sinks")}
    with torch.no_grad():
        functional = torch.func.functional_call(model, changed, kwargs={"input_ids": IDS, "use_cache": False}).logits
        for n, value in changed.items():
            model.get_parameter(n).copy_(value)
    assert torch.allclose(functional, logits(model, input_ids=IDS))


def test_plain_transformers_with_the_registered_name():
    model = build("gpt_oss")
    theirs = under_eager(model, lambda m: logits(m, input_ids=IDS))
    model.set_attn_implementation("sinkhold")
    assert registered_attention(model.model.layers[0].self_attn) is None
    with torch.no_grad():
        ours = logits(model, input_ids=IDS)
    assert relative(ours, theirs) <= 1e-5
    assert registered_attention(model.model.layers[0].self_attn).sinks is model.model.layers[0].self_attn.sinks
    assert len(adapter.report(model).sink_layers) == 4


def test_a_model_attached_at_its_first_call_can_still_be_adapted_and_restored():
    model = build("gpt_oss")
    model.set_attn_implementation("sinkhold")
    logits(model, input_ids=IDS)
    adapter.adapt(model, "eager")
    assert set(adapter.report(model).layers[0].backends.values()) >= {"eager"}
    adapter.restore(model)
    assert not any(isinstance(m, Attention) for m in model.modules())


def test_two_threads_adapt_two_models_without_disturbing_each_other():
    models = [build("gpt_oss"), build("granite_swa")]
    expected = [under_eager(m, lambda m: logits(m, input_ids=IDS)) for m in models]
    before, failures = [fingerprint(m) for m in models], []

    def work(model, theirs):
        try:
            with torch.no_grad():
                for _ in range(10):
                    with adapter.adapted(model):
                        assert relative(logits(model, input_ids=IDS), theirs) <= 1e-5
        except BaseException as error:  # noqa: BLE001  handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [fingerprint(m) for m in models] == before


def test_500_cycles_leave_no_trace():
    resource = pytest.importorskip("resource")
    model = build("gpt_oss", num_hidden_layers=2)

    def cycle(count):
        for _ in range(count):
            with adapter.adapted(model, recording=False):
                logits(model, input_ids=IDS[:, :3])
        gc.collect()

    with torch.no_grad():
        cycle(20)
        before, objects = fingerprint(model), len(gc.get_objects())
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cycle(500)
    assert fingerprint(model) == before
    assert len(gc.get_objects()) - objects < 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 20 * 1024


def test_weights_are_shared_not_copied():
    model = build("gpt_oss")
    pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
    adapter.adapt(model)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == pointers
    assert not list(model.model.layers[0].self_attn.attn.parameters())


def test_an_attention_that_outlives_its_module_says_so():
    model = build("gpt_oss")
    adapter.adapt(model)
    attn = model.model.layers[0].self_attn.attn
    del model
    gc.collect()
    with pytest.raises(SinkError, match="is gone"):
        _ = attn.owner


def test_output_attentions_returns_weights_without_the_sink_column():
    # transformers returns rows that sum to one for two families: the sink's share is then lost from sight.
    model = build("granite_swa")
    with adapter.adapted(model), torch.no_grad():
        weights = model(input_ids=IDS, output_attentions=True).attentions[0]
    assert weights.shape == (1, 4, 9, 9)
    rows = weights.sum(-1)
    assert (rows <= 1 + 1e-6).all()
    assert rows.mean() < 0.9


def test_an_adapted_model_does_not_change_its_attention_in_silence():
    model = build("gpt_oss")
    adapter.adapt(model)
    with pytest.raises(AdaptError, match=r"set_attn_implementation\('eager'\) on an adapted GptOssForCausalLM"):
        model.set_attn_implementation("eager")
    model.set_attn_implementation("sinkhold")
    adapter.restore(model)
    model.set_attn_implementation("eager")


def test_context_parallelism_that_drops_the_sinks_is_not_offered():
    # transformers runs it through an attention without sinks, and claims it for models of full attention.
    model = build("gpt_oss", layer_types=["full_attention"] * 4)
    if not hasattr(model, "supports_context_parallel"):
        pytest.skip("this transformers has no context parallelism")
    claimed = model.supports_context_parallel
    with adapter.adapted(model):
        assert not model.supports_context_parallel
    assert model.supports_context_parallel == claimed


def test_the_names_are_registered_again_when_something_took_them_away():
    model = build("gpt_oss")
    expected = under_eager(model, lambda m: logits(m, input_ids=IDS))
    AttentionMaskInterface._global_mapping.pop("sinkhold")
    with adapter.adapted(model), torch.no_grad():
        assert relative(logits(model, input_ids=IDS), expected) <= 1e-5


def test_a_bool_mask_that_the_module_would_invert_is_refused():
    model = build("deepseek_v4")
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    with adapter.adapted(model, recording=False), pytest.raises(adapter.CallError, match="the mask is bool"):
        model(input_ids=IDS, attention_mask=mask, use_cache=False)


def test_what_is_no_model_is_refused():
    with pytest.raises(AdaptError, match="str is no torch module"):
        adapter.adapt("openai/gpt-oss-20b")
