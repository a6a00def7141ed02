"""transformers' pipeline on two ranks gives what one process gives; what it would get wrong in silence is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import DistributedConfig

import adapter
from adapter.pipeline import check_stages
from adapter.verify import verify
from tests.families import FAMILIES, INSTALLED, save, tokens
from tests.parallel.measure import measure_loaded, measured
from tests.parallel.ranks import RankFailed, run_ranks
from tests.parallel.support import needs_local_params
from tests.parallel.test_training import assert_same_files

pytestmark = needs_local_params

SPLIT = [n for n in ("gpt_oss", "granite_swa", "granitemoe_swa", "flint", "mimo_v2_flash") if n in INSTALLED]
NOT_CUT = {
    "deepseek_v4": "what stands before and after its layers changes the hidden states",
    "hy_v4": "ValueError: not enough values to unpack",
}
"""Their layers exchange more than one hidden state."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.set_num_threads(1)
    folders, expected = {}, {}
    for name in SPLIT:
        folders[name] = tmp_path_factory.mktemp(name)
        model = save(name, folders[name])
        model.set_attn_implementation("eager")
        expected[name] = measured(model, name)
    return folders, expected


def load(folder, name="gpt_oss"):
    config = DistributedConfig(pp_size=2)
    return getattr(adapter, FAMILIES[name].auto).from_pretrained(str(folder), distributed_config=config)


def measure_stages(folders):
    return measure_loaded(folders, distributed_config=DistributedConfig(pp_size=2))


@pytest.fixture(scope="module")
def stages(saved):
    return run_ranks(2, measure_stages, saved[0], timeout=200)


def save_stages(folders, out):
    for name, folder in folders.items():
        load(folder, name).save_pretrained(f"{out}/{name}")


def test_the_stages_save_the_files_of_one_process(saved, tmp_path):
    run_ranks(2, save_stages, saved[0], str(tmp_path))
    for name, folder in saved[0].items():
        assert_same_files(folder, tmp_path / name)


def test_a_state_dict_that_is_given_is_saved_as_it_is(saved, tmp_path):
    run_ranks(2, save_own_layers, saved[0]["granite_swa"], str(tmp_path))
    assert set(load_file(tmp_path / "model.safetensors")) == {"model.layers.0.self_attn.sinks"}


def save_own_layers(folder, out):
    model = load(folder, "granite_swa")
    model.save_pretrained(out, state_dict={"model.layers.0.self_attn.sinks": torch.ones(4)})


@pytest.mark.parametrize("name", SPLIT)
def test_two_stages_equal_one_process(saved, stages, name):
    """Prefill, padding, decode by hand, 32 greedy tokens with a dynamic and a static cache, on both ranks."""
    for rank in stages:
        found = rank[name]["outputs"]
        assert found.keys() == saved[1][name].keys()
        for key, reference in saved[1][name].items():
            if key.endswith("tokens"):
                assert torch.equal(found[key], reference), key
            else:
                assert (found[key] - reference).abs().max() <= 1e-4 * reference.abs().max(), key
    held = [len(rank[name]["sinks"]) for rank in stages]
    whole = adapter.AutoModelForCausalLM.from_pretrained(str(saved[0][name]))
    assert sum(held) == sum(m.sinks is not None for m in whole.modules() if isinstance(m, adapter.Attention))
    assert all(held)


def inspect_stage(folder):
    model = load(folder)
    ids = tokens(2, 12)
    found = {
        "report": adapter.report(model), "verify": verify(model),
        "hooks": len(model.model._forward_pre_hooks),
    }  # fmt: skip
    found["layers"] = [type(layer).__name__ for layer in model.model.layers]
    with torch.no_grad():
        cache = model(ids[:, :9], use_cache=True).cache
        model(ids[:, 9:11], past_key_values=cache)  # the name that transformers has renamed
        found["last"] = model(ids[:, 11:], cache=cache).logits
    found["length"] = cache.get_seq_length()
    adapter.restore(model)
    found["restored hooks"] = len(model.model._forward_pre_hooks)
    return found


@pytest.fixture(scope="module")
def inspected(saved):
    return run_ranks(2, inspect_stage, saved[0]["gpt_oss"])


def test_the_report_lists_the_layers_of_the_stage(inspected):
    paths = [[layer.path for layer in rank["report"].layers] for rank in inspected]
    assert paths == [[f"model.layers.{i}.self_attn" for i in own] for own in ((0, 1), (2, 3))]


def test_the_check_of_the_cut_leaves_the_layers_in_their_places(inspected):
    own, other = ["GptOssDecoderLayer"] * 2, ["PipelineIdentityLayer"] * 2
    assert [rank["layers"] for rank in inspected] == [own + other, other + own]


def test_verify_passes_on_each_stage(inspected):
    for rank in inspected:
        assert rank["verify"].failed == ()
        skipped = {probe.name: probe.detail for probe in rank["verify"].rows if probe.status == "skipped"}
        assert (
            skipped["tensor parallel = single"] == "the ranks are the stages of a pipeline, and hold different layers"
        )


def test_a_cache_under_its_old_name_is_used(saved, inspected):
    for rank in inspected:
        assert rank["length"] == 12
        assert (rank["last"][:, 0] - saved[1]["gpt_oss"]["prefill"][:, -1]).abs().max() <= 1e-3


def test_restore_takes_the_hook_away(inspected):
    assert [(rank["hooks"], rank["restored hooks"]) for rank in inspected] == [(1, 0), (1, 0)]


def pass_unknown(folder):
    load(folder)(tokens(1, 8), made_up=torch.ones(1))


def test_a_keyword_that_nothing_applies_is_an_error_by_its_name(saved):
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, pass_unknown, saved[0]["gpt_oss"], timeout=60)
    texts = failed.value.texts
    assert set(texts) == {0, 1}
    assert texts[0].startswith("CallError: [SINK-202] the model passes made_up= to its attention")
    assert "no answer" not in texts[1]


def load_all(folders):
    found = {}
    for name, folder in folders.items():
        with pytest.raises(adapter.ParallelError) as caught:
            load(folder, name)
        found[name] = (caught.value.what, caught.value.why, caught.value.fix)
    return found


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    torch.set_num_threads(1)
    folders = {}
    for name in (name for name in INSTALLED if name not in SPLIT):
        folders[name] = tmp_path_factory.mktemp(name)
        save(name, folders[name])
    folders["granite_swa"] = tmp_path_factory.mktemp("multiplied")
    save("granite_swa", folders["granite_swa"], embedding_multiplier=12.0)
    return run_ranks(2, load_all, folders, timeout=200)


OTHER_WAYS = 'split it by tensor parallelism (tp_plan="auto"), or place it with device_map'


@pytest.mark.parametrize("name", [name for name in NOT_CUT if name in INSTALLED])
def test_layers_that_exchange_more_than_a_hidden_state_are_refused(refused, name):
    for rank in refused:
        what, why, fix = rank[name]
        assert f"Model cannot be cut between its layers: {NOT_CUT[name]}" in what
        assert "the logits would be wrong without an error" in why
        assert fix == OTHER_WAYS


def test_embeddings_that_every_stage_would_scale_again_are_refused(refused):
    for what, _, _ in (rank["granite_swa"] for rank in refused):
        assert what == f"GraniteSWAModel cannot be cut between its layers: {NOT_CUT['deepseek_v4']}"


@pytest.mark.parametrize("name", [n for n in INSTALLED if n not in SPLIT and n not in NOT_CUT])
def test_what_is_no_list_of_a_language_models_layers_is_refused_before_loading(refused, name):
    lacking = "is no causal language model" if name == "openai_privacy_filter" else "has no list of layers"
    for rank in refused:
        what, _, fix = rank[name]
        assert what.startswith("transformers' pipeline cannot split this model: ")
        assert lacking in what
        assert fix == OTHER_WAYS


def test_a_plain_module_has_no_stages():
    with pytest.raises(adapter.ParallelError, match="NoneType has no list of layers"):
        check_stages(type("Odd", (nn.Module,), {"base_model_prefix": "model"})())
