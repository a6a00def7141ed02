"""The drop-ins take everything that transformers takes, and refuse what would lose a sink."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import adapter
from adapter import auto
from adapter.errors import AdaptError, BackendError, CheckpointError
from tests.adapter.comparison import logits, relative, under_eager
from tests.families import FAMILIES, INSTALLED, save, tokens

IDS = tokens(1, 9)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss")
    save("gpt_oss", folder)
    return folder


def accepted_keywords():
    """Each keyword of transformers' from_pretrained: its signature, and what it takes out of **kwargs."""
    function = inspect.unwrap(PreTrainedModel.from_pretrained.__func__)
    named = {
        n
        for n, p in inspect.signature(function).parameters.items()
        if p.kind is p.KEYWORD_ONLY or p.default is not p.empty
    }
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    popped = {
        call.args[0].value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("pop", "get")
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "kwargs"
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    }
    return sorted((named | popped) - {"pretrained_model_name_or_path"})


def test_every_keyword_of_from_pretrained_is_carried_through(monkeypatch):
    keywords = accepted_keywords()
    assert len(keywords) > 25
    assert {"device_map", "dtype", "quantization_config", "tp_plan", "key_mapping"} <= set(keywords)
    seen = {}

    class Spy:
        @staticmethod
        def from_pretrained(path, *args, **kwargs):
            seen.update(kwargs, path=path, args=args)
            return torch.nn.Linear(1, 1), {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}

    class Auto(auto._AutoAdapter):
        auto = Spy

    given = {name: object() for name in keywords if name not in ("attn_implementation", "output_loading_info")}
    given["use_safetensors"] = True
    Auto.from_pretrained("owner/name", "positional", **given)
    assert seen.pop("path") == "owner/name"
    assert seen.pop("args") == ("positional",)
    assert seen.pop("output_loading_info") is True
    assert seen == given


@pytest.mark.parametrize("name", INSTALLED)
def test_every_family_loads_runs_and_saves_the_same_bytes(name, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    save(name, source)
    model = getattr(adapter, FAMILIES[name].auto).from_pretrained(source)
    assert adapter.is_adapted(model)
    with torch.no_grad():
        ours = logits(model, input_ids=IDS)
    model.save_pretrained(target)
    for file in source.glob("*.safetensors"):
        assert tensors(file) == tensors(target / file.name)
    plain = getattr(transformers, FAMILIES[name].auto).from_pretrained(target, attn_implementation="eager")
    with torch.no_grad():
        assert relative(ours, logits(plain.eval(), input_ids=IDS)) <= 1e-5


def tensors(file):
    with safe_open(file, "pt") as opened:
        return {
            k: (str(t.dtype), t.shape, t.contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else t.item())
            for k in opened.keys()  # noqa: SIM118  a safetensors file is no dict
            for t in [opened.get_tensor(k)]
        }


def test_loading_info_comes_as_the_tuple_that_transformers_gives(checkpoint):
    model, info = adapter.AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert isinstance(model, PreTrainedModel)
    assert not info["missing_keys"]


def test_the_module_function_picks_the_class_of_the_checkpoint(checkpoint, tmp_path):
    assert type(adapter.from_pretrained(checkpoint)).__name__ == "GptOssForCausalLM"
    save("openai_privacy_filter", tmp_path)
    assert type(adapter.from_pretrained(tmp_path)).__name__ == "OpenAIPrivacyFilterForTokenClassification"


def test_from_config(checkpoint):
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model = adapter.AutoModelForCausalLM.from_config(config, backend="eager", dtype=torch.bfloat16)
    assert model.dtype is torch.bfloat16
    assert adapter.report(model).backend == "eager"


def test_dtype_and_device_map(checkpoint):
    model = adapter.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, device_map="cpu")
    assert model.dtype is torch.bfloat16
    assert logits(model, input_ids=IDS).isfinite().all()


def test_disk_offload_keeps_its_hooks(checkpoint, tmp_path):
    expected = logits(adapter.AutoModelForCausalLM.from_pretrained(checkpoint), input_ids=IDS)
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
    device_map |= {f"model.layers.{i}": "disk" if i > 1 else "cpu" for i in range(4)}
    model = adapter.AutoModelForCausalLM.from_pretrained(checkpoint, device_map=device_map, offload_folder=tmp_path)
    assert "offloaded by accelerate" in adapter.report(model).recording
    assert relative(logits(model, input_ids=IDS), expected) <= 1e-5


@pytest.mark.parametrize("implementation", ["sdpa", "flash_attention_2", "eager"])
def test_two_attentions_at_once_are_refused(checkpoint, implementation):
    with pytest.raises(AdaptError, match=f"attn_implementation='{implementation}' names another attention"):
        adapter.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=implementation)


def test_the_own_implementation_may_be_named(checkpoint):
    model = adapter.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sinkhold")
    assert logits(model, input_ids=IDS).isfinite().all()


def test_plain_transformers_loads_under_the_registered_name(checkpoint):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sinkhold").eval()
    with torch.no_grad():
        ours = logits(model, input_ids=IDS)
    assert relative(ours, under_eager(model, lambda m: logits(m, input_ids=IDS))) <= 1e-5


def test_an_unknown_backend_is_refused_before_anything_is_loaded():
    with pytest.raises(BackendError, match="there is no backend 'warp'"):
        adapter.AutoModelForCausalLM.from_pretrained("no/such-model", backend="warp")


def test_the_constructor_says_what_to_call():
    with pytest.raises(OSError, match=r"use AutoModelForCausalLM.from_pretrained"):
        adapter.AutoModelForCausalLM()


def test_a_checkpoint_without_sinks_is_refused_unless_asked_for(checkpoint, tmp_path):
    state = load_file(checkpoint / "model.safetensors")
    save_file(
        {k: v for k, v in state.items() if not k.endswith("1.self_attn.sinks")},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.sinks") as caught:
        adapter.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "allow_missing_sinks=True" in str(caught.value)
    model = adapter.AutoModelForCausalLM.from_pretrained(tmp_path, allow_missing_sinks=True)
    assert adapter.is_adapted(model)


def test_a_sink_that_is_no_number_is_refused(checkpoint, tmp_path):
    state = load_file(checkpoint / "model.safetensors")
    state["model.layers.2.self_attn.sinks"][1] = float("nan")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.self_attn\.sinks"):
        adapter.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_sink_of_another_shape_is_named(checkpoint, tmp_path):
    state = load_file(checkpoint / "model.safetensors")
    state["model.layers.2.self_attn.sinks"] = torch.full((3,), 2.0)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(
        CheckpointError, match=r"'model\.layers\.2\.self_attn\.sinks' is \[3\] in the checkpoint and \[4\] in the model"
    ):
        adapter.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("strategy", ["greedy", "sampling", "beams", "streaming", "assisted", "static"])
def test_generate_works_as_before(checkpoint, strategy):
    if strategy == "assisted" and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("this transformers' own assisted generation fails over a sliding cache")
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    ours = adapter.AutoModelForCausalLM.from_pretrained(checkpoint).eval()

    class Streamer(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.received = []

        def put(self, value):
            self.received += value.flatten().tolist()

        def end(self):
            self.received.append("end")

    def run(model):
        options = {
            "greedy": {}, "sampling": {"do_sample": True, "top_k": 20}, "beams": {"num_beams": 3},
            "streaming": {"streamer": Streamer()}, "assisted": {"assistant_model": model},
            "static": {"cache_implementation": "static"},
        }[strategy]  # fmt: skip
        torch.manual_seed(4)
        ids = model.generate(
            input_ids=IDS,
            attention_mask=torch.ones_like(IDS),
            max_new_tokens=10,
            do_sample=options.pop("do_sample", False),
            **options,
        )
        if strategy == "streaming":
            assert options["streamer"].received == [*ids[0].tolist(), "end"]
        return ids

    assert run(ours).tolist() == run(plain).tolist()
