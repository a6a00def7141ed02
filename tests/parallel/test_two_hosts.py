"""Two torchrun agents with addresses of their own, as on two machines: one model, and one error when a rank fails."""

from __future__ import annotations

import os
import re
import shutil
import socket

import pytest
import torch
import torch.distributed as dist

from adapter.parallel import Agreement, start_ranks
from tests.families import save
from tests.parallel.launching import WAITS, free_port, torchrun
from tests.parallel.ranks import RankFailed, run_ranks
from tests.parallel.support import needs_local_params

HOSTS = ("127.0.0.2", "127.0.0.3")


def can_bind(host):
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


pytestmark = [
    needs_local_params,
    pytest.mark.skipif(not all(map(can_bind, HOSTS)), reason="only one loopback address here"),
]

IDS = torch.arange(3, 27).view(2, 12)
NEW_TOKENS = 8

GOOD_THEN_OTHER = """
import os
import sys

import torch
import torch.distributed as dist

from adapter import AutoModelForCausalLM
from adapter.verify import verify

good, other, out = sys.argv[1:]
ids = torch.arange(3, 27).view(2, 12)
model = AutoModelForCausalLM.from_pretrained(good, tp_plan="auto").eval()
with torch.no_grad():
    logits = model(input_ids=ids).logits
found = {
    "logits": logits,
    "tokens": model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1),
    "failed": verify(model).failed,
    "sinks": model.model.layers[0].self_attn.attn.sinks.detach(),
    "host": int(os.environ["GROUP_RANK"]),
    "address": os.environ["MASTER_ADDR"],
}
torch.save(found, f"{out}/rank{dist.get_rank()}.pt")
AutoModelForCausalLM.from_pretrained(other, tp_plan="auto")
"""

DIES = """
import os
import sys
import time

from torch.nn.modules.module import register_module_parameter_registration_hook

from adapter import AutoModelForCausalLM
from adapter.errors import ParallelError

folder, dies = sys.argv[1:]
loaded = 0


def hook(module, name, parameter):
    global loaded
    if parameter is not None and not parameter.is_meta:
        loaded += 1
        if dies == "dies" and loaded == 5:
            os._exit(7)


register_module_parameter_registration_hook(hook)
start = time.monotonic()
try:
    AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
except ParallelError as error:
    print(f"after {time.monotonic() - start:.1f} s and {loaded} weights: {error}", flush=True)
    raise SystemExit(3)
"""


def on_two_hosts(folder, script, arguments, ranks=1):
    """How each host's agent ends that runs `script` with its own arguments as `ranks` ranks."""
    (folder / "script.py").write_text(script)
    port = free_port(HOSTS[0])
    agents = [
        [
            *("--nnodes", 2, "--nproc-per-node", ranks, "--max-restarts", 0, "--local-addr", host),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HOSTS[0]}:{port}", "--rdzv-id", "two-hosts"),
            *("--rdzv-conf", f"is_host={int(host == HOSTS[0])}", folder / "script.py", *own),
        ]
        for host, own in zip(HOSTS, arguments, strict=True)
    ]
    return torchrun(folder, *agents)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Two ranks on each host that load a good checkpoint, and then one whose copy is damaged on the second host."""
    folder = tmp_path_factory.mktemp("hosts")
    torch.set_num_threads(1)
    model = save("gpt_oss", folder / "good")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = {"logits": model(input_ids=IDS).logits}
    expected["tokens"] = model.generate(IDS, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    expected["sinks"] = model.model.layers[0].self_attn.sinks.detach()
    shutil.copytree(folder / "good", folder / "damaged")
    weights = folder / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    arguments = [(folder / "good", folder / other, folder) for other in ("good", "damaged")]
    hosts = on_two_hosts(folder, GOOD_THEN_OTHER, arguments, ranks=2)
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(4)]
    return hosts, ranks, expected


def test_logits_and_tokens_equal_one_process(ended):
    _, ranks, expected = ended
    assert sorted(rank["host"] for rank in ranks) == [0, 0, 1, 1]
    assert {rank["address"] for rank in ranks} <= set(HOSTS)
    assert torch.equal(torch.cat([rank["sinks"] for rank in ranks]), expected["sinks"])
    for rank in ranks:
        assert (rank["logits"] - expected["logits"]).abs().max() <= 1e-4 * expected["logits"].abs().max()
        assert torch.equal(rank["tokens"], expected["tokens"])


def test_verify_passes_with_more_ranks_than_key_heads(ended):
    assert [rank["failed"] for rank in ended[1]] == [()] * 4


def test_a_damaged_checkpoint_on_one_host_stops_both_with_its_error(ended):
    (good, damaged), ranks, _ = ended
    assert (good.code, damaged.code) == (1, 1)
    own = r"\[SINK-407\] 'model\.safetensors' should have \d+ bytes by its header and has \d+: truncated"
    assert re.search(rf"checkpoint\.errors\.HeaderError: {own}", damaged.said), damaged.said
    quoted = re.search(rf"\[SINK-601\] rank (\d) failed to load: HeaderError: {own}", good.said)
    assert quoted, good.said
    assert ranks[int(quoted[1])]["host"] != ranks[int(re.search(r"\[rank(\d)\]: Traceback", good.said)[1])]["host"]
    assert "failed to load" not in damaged.said


def test_a_rank_that_dies_while_it_loads_stops_the_other(tmp_path):
    save("gpt_oss", tmp_path / "model")
    lives, dies = on_two_hosts(tmp_path, DIES, [(tmp_path / "model", "lives"), (tmp_path / "model", "dies")])
    assert re.search(r"exitcode +: 7", dies.said)
    assert re.search(r"exitcode +: 3", lives.said)
    found = re.search(
        r"after ([\d.]+) s and (\d+) weights: \[SINK-601\] another rank ended while it loaded", lives.said
    )
    assert found, lives.said
    assert float(found[1]) < WAITS
    assert int(found[2]) > 5


def raises_while_the_other_dies():
    start_ranks()
    with Agreement():
        if dist.get_rank() == 1:
            os._exit(7)
        raise ValueError("of this rank")


def test_a_rank_keeps_its_own_error_when_another_dies():
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, raises_while_the_other_dies, timeout=60)
    assert failed.value.texts[0].startswith("ValueError: of this rank")
    assert failed.value.texts[1] == "the process died"
