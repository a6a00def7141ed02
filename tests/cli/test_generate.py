"""sinkhold generate: the same tokens as transformers' eager, text through a tokenizer, and every wrong use."""

from __future__ import annotations

import importlib
import shutil

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit


def eager_tokens(checkpoint, ids, count):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    prompt = torch.tensor([ids])
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)
    return made[0, len(ids) :].tolist()


def test_token_ids_equal_eager(sinkhold, checkpoint):
    ids = list(range(3, 23))
    result = sinkhold("generate", checkpoint, "--prompt-ids", ",".join(map(str, ids)), "--max-new-tokens", "6")
    assert result.exit_code == 0
    assert result.stdout == ",".join(map(str, eager_tokens(checkpoint, ids, 6))) + "\n"


@pytest.fixture
def with_tokenizer(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    words = {f"w{i}": i for i in range(128)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w3").save_pretrained(folder)
    return folder


def test_text_is_decoded(sinkhold, with_tokenizer):
    result = sinkhold("generate", with_tokenizer, "--prompt", "w5 w6 w7", "--max-new-tokens", "3")
    assert result.exit_code == 0, result.output
    expected = eager_tokens(with_tokenizer, [5, 6, 7], 3)
    assert result.stdout.split() == [f"w{i}" for i in expected if i != 3]


def test_text_is_streamed_to_a_terminal(with_tokenizer, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    command_module = importlib.import_module("adapter.cli.generate")
    model = command_module.load_model(str(with_tokenizer), "auto", "auto", False)
    tokenizer = command_module._tokenizer(str(with_tokenizer), False)
    rest = command_module._continue(model, tokenizer, tokenizer("w5 w6 w7", return_tensors="pt"), 3)
    assert rest == ""
    assert capsys.readouterr().out.split() == [f"w{i}" for i in eager_tokens(with_tokenizer, [5, 6, 7], 3) if i != 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give exactly one of --prompt and --prompt-ids"),
        (("--prompt", "a", "--prompt-ids", "1"), "give exactly one of --prompt and --prompt-ids"),
        (("--prompt-ids", "1,b"), "'1,b' is not a list of token ids like 1,2,3"),
        (("--prompt-ids", "1,128"), "128 is not below the vocabulary's size, 128"),
        (("--prompt", "hello"), "no tokenizer that loads"),
        (("--prompt-ids", "1", "--max-new-tokens", "0"), "max-new-tokens"),
        (("--prompt-ids", "1", "--dtype", "float33"), "'float33' is not a dtype"),
    ],
)
def test_wrong_use_is_exit_code_2(sinkhold, checkpoint, arguments, message):
    result = sinkhold("generate", checkpoint, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
