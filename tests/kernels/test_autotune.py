"""Tuning: candidates are held to the contract, timed, kept on disk and used; and the tables and lines around it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from adapter.backends.autotune import FORWARD, TRAINING, Trial, tune
from adapter.backends.triton import BACKEND
from adapter.errors import BackendError
from adapter.kernels import backward, choice, compiling, decode, launching, prefill, tuned_file, tuning
from adapter.kernels.candidates import candidates
from adapter.kernels.kinds import KERNELS, Kernel, Kind, length_of
from adapter.kernels.layer_shape import LayerShape
from adapter.kernels.tuned_file import TunedRow
from adapter.kernels.tuning import Tile, tile_for

from .comparison import expected, random_call

SHAPE = LayerShape(4, 2, 16, 16, torch.float32)
WINDOWED = LayerShape(4, 2, 16, 16, torch.float32, window=7)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="about the interpreter's few candidates")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(tuned_file.SWITCH, raising=False)
    choice.forget()
    yield tmp_path / "sinkhold" / "tiles"
    choice.forget()


def tile_of_run(run: Any) -> Tile:
    """The tile of a timed call."""
    given = [*run.args, *run.keywords.values()]
    return next(value for value in reversed(given) if isinstance(value, Tile))


def last_is_fastest(shape: LayerShape, kernel: Kernel) -> tuple[list[Tile], Callable[[Any], float]]:
    """The candidates, and a clock on which each is faster than the one before."""
    tiles = candidates(shape.kind(kernel, "short"), (0, 0), 32)
    return tiles, lambda run: 100.0 / (1 + tiles.index(tile_of_run(run)))


def launched(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[Tile]:
    """The tiles that a module's launches get from now on."""
    seen: list[Tile] = []
    run = module.launch

    def launch(*arguments: Any) -> None:
        seen.append(arguments[-1])
        run(*arguments)

    monkeypatch.setattr(module, "launch", launch)
    return seen


@interpreted
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_fastest_tile_is_kept_and_used(kernel: Kernel, device: torch.device, monkeypatch: Any) -> None:
    tiles, clock = last_is_fastest(SHAPE, kernel)
    assert len(tiles) > 1
    said: list[Any] = []
    (row,) = tune(SHAPE, [kernel], ["short"], device, clock=clock, say=said.append)
    assert row == said[-1] == TunedRow(SHAPE.kind(kernel, "short"), tiles[-1], 100.0 / len(tiles), 100.0)
    assert [(t.number, t.total, t.tile) for t in said[:-1]] == [(n, len(tiles), t) for n, t in enumerate(tiles, 1)]

    choice.forget()  # what another process would read
    seen = launched(monkeypatch, {"prefill": prefill, "decode": decode}.get(kernel, backward))
    q_length = 1 if kernel == "decode" else 33
    call = random_call(device, q_length=q_length, right=0, q_offset=33 - q_length)
    call.query.requires_grad_(kernel.startswith("backward"))
    output = BACKEND.attend(call).output
    torch.testing.assert_close(output.detach().double(), expected(call).detach(), atol=1e-5, rtol=0)
    if kernel.startswith("backward"):
        output.sum().backward()
    assert tiles[-1] in seen
    seen.clear()
    other = random_call(device, q_length=q_length, right=0, q_offset=33 - q_length, width=24)
    BACKEND.attend(other)
    assert tiles[-1] not in seen, "a tile serves the kind that it was tuned for and no other"


@interpreted
def test_kinds_differ_in_length_and_window(device: torch.device) -> None:
    _, clock = last_is_fastest(SHAPE, "prefill")
    (row,) = tune(SHAPE, ["prefill"], ["middle"], device, clock=clock)

    def tile(kv_length: int, windowed: bool) -> Tile:
        query = torch.empty(1, 4, 8, 16, device=device)
        return choice.tile_on("prefill", query, query, 2, kv_length, windowed)

    assert [length_of(n) for n in (1, 1024, 1025, 8192, 8193)] == ["short", "short", "middle", "middle", "long"]
    assert tile(1025, False) == tile(8192, False) == row.tile
    shipped = tile_for("prefill", (0, 0), 16, 4, False, 16)
    assert shipped != row.tile
    assert tile(1024, False) == tile(8193, False) == shipped
    assert tile(1025, True) == tile_for("prefill", (0, 0), 16, 4, True, 16)


def broken(monkeypatch: pytest.MonkeyPatch, bad: Tile, when: Callable[[Any], bool] = lambda masking: True) -> None:
    """Double what prefill computes with one tile."""
    attend = prefill.attend

    def wrong(*arguments: Any, tile: Tile | None = None) -> Any:
        out, lse = attend(*arguments, tile=tile)
        return (out * 2 if tile == bad and when(arguments[6]) else out), lse

    monkeypatch.setattr(prefill, "attend", wrong)


@interpreted
@pytest.mark.parametrize("where", ["always", "under padding"])
def test_a_fast_tile_that_is_wrong_is_dropped(where: str, device: torch.device, monkeypatch: Any) -> None:
    tiles, clock = last_is_fastest(WINDOWED, "prefill")
    assert len(tiles) > 2
    broken(monkeypatch, tiles[-1], lambda masking: where == "always" or masking.padding is not None)
    said: list[Any] = []
    (row,) = tune(WINDOWED, ["prefill"], ["short"], device, clock=clock, say=said.append)
    assert row.tile == tiles[-2]
    (dropped,) = [t for t in said if isinstance(t, Trial) and t.problem]
    assert dropped.tile == tiles[-1]
    assert dropped.microseconds is None
    assert dropped.problem is not None
    assert "backend 'triton' is wrong: output is off by" in dropped.problem
    assert ("padding" in dropped.problem) == (where == "under padding")


@interpreted
def test_a_tile_that_needs_too_much_shared_memory_is_dropped(device: torch.device, monkeypatch: Any) -> None:
    tiles, clock = last_is_fastest(SHAPE, "decode")
    attend = decode.attend

    def small(*arguments: Any, tile: Tile | None = None) -> Any:
        if tile == tiles[-1]:
            raise OutOfResources(300000, 232448, "shared memory")
        return attend(*arguments, tile=tile)

    monkeypatch.setattr(decode, "attend", small)
    said: list[Any] = []
    (row,) = tune(SHAPE, ["decode"], ["short"], device, clock=clock, say=said.append)
    assert row.tile == tiles[-2]
    (problem,) = [t.problem for t in said if isinstance(t, Trial) and t.problem]
    assert problem.startswith("it does not compile: out of resource: shared memory, Required: 300000")


@interpreted
def test_no_other_error_is_taken_for_a_bad_candidate(device: torch.device, monkeypatch: Any) -> None:
    def lost(*arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(prefill, "attend", lost)
    with pytest.raises(RuntimeError, match="the device is lost"):
        tune(SHAPE, ["prefill"], ["short"], device, clock=lambda run: 1.0)


@interpreted
def test_where_no_candidate_is_right_nothing_is_kept(device: torch.device, monkeypatch: Any, cache: Path) -> None:
    attend = decode.attend
    monkeypatch.setattr(decode, "attend", lambda *a, **k: (attend(*a, **k)[0] * 2, None))
    with pytest.raises(BackendError, match=r"no candidate computes decode float32.* as the reference does"):
        tune(SHAPE, ["decode"], ["short"], device, clock=lambda run: 1.0)
    assert not list(cache.glob("*.json"))


@interpreted
@pytest.mark.parametrize(("time", "gains"), [(99.0, False), (97.0, True)])
def test_noise_does_not_replace_the_shipped_tile(time: float, gains: bool, device: torch.device) -> None:
    tiles, _ = last_is_fastest(SHAPE, "decode")
    clock = {tiles[0]: 100.0, tiles[1]: time}
    (row,) = tune(SHAPE, ["decode"], ["short"], device, clock=lambda run: clock[tile_of_run(run)])
    assert row.tile == tiles[gains]


@interpreted
def test_nothing_is_written_where_it_is_not_wanted(device: torch.device, cache: Path) -> None:
    _, clock = last_is_fastest(SHAPE, "decode")
    tune(SHAPE, ["decode"], ["short"], device, clock=clock, save=False)
    assert not cache.exists()


def test_what_the_kernels_cannot_run_is_not_tuned(monkeypatch: Any, device: torch.device) -> None:
    monkeypatch.setattr("adapter.backends.autotune.capability_of", lambda device: (7, 5))
    with pytest.raises(BackendError, match=r"cannot run this layer: .*compute capability 7\.5 \(needs 8\.0\)"):
        tune(SHAPE, FORWARD, device=torch.device("cuda", 0))
    with pytest.raises(BackendError, match=r"3 query heads over 2 kv heads; head dims 640/16 \(at most 512\)"):
        tune(LayerShape(3, 2, 640, 16, torch.float32), TRAINING, device=device)


PLAIN_TILE = Tile(32, 32, 4, 2)


def row_of(group: int, tile: Tile = PLAIN_TILE, length: Any = "short") -> TunedRow:
    """A row for a kind of its own."""
    return TunedRow(Kind("prefill", torch.bfloat16, 64, 64, group, False, length), tile, 1.5, 2.0)


def test_the_file_gives_back_what_was_put_into_it(device: torch.device, cache: Path) -> None:
    first, second, third = row_of(1), row_of(2), row_of(1, Tile(64, 16, 8, 3, 128, True, False, True, 2))
    path = tuned_file.keep(device, [first, second])
    assert path.parent == cache
    tuned_file.keep(device, [third])
    (file,) = tuned_file.files()
    assert file.rows == (third, second)
    assert file.header.is_current
    assert tuned_file.tuned_tiles(device) == {row.kind: row.tile for row in (third, second)}


def test_writers_at_the_same_time_lose_nothing(device: torch.device, monkeypatch: Any) -> None:
    replace = tuned_file._replace

    def slowly(path: Path, text: str) -> None:
        time.sleep(0.02)
        replace(path, text)

    monkeypatch.setattr(tuned_file, "_replace", slowly)
    writers = [threading.Thread(target=tuned_file.keep, args=(device, [row_of(n)])) for n in range(1, 7)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    (file,) = tuned_file.files()
    assert {row.kind.group for row in file.rows} == set(range(1, 7))


def test_a_write_that_fails_leaves_the_file_as_it_was(device: torch.device, cache: Path, monkeypatch: Any) -> None:
    path = tuned_file.keep(device, [row_of(1)])
    before = path.read_bytes()

    def full(*names: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(BackendError, match=f"cannot be written to {path}: No space left on device") as caught:
        tuned_file.keep(device, [row_of(2)])
    assert caught.value.fix == "make that folder writable, or set XDG_CACHE_HOME to one that is"
    assert path.read_bytes() == before
    assert sorted(p.name for p in cache.iterdir()) == sorted([".lock", path.name])


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "empty": lambda data: None,
    "no JSON": lambda data: b"{",
    "no text": lambda data: b"\xff\xfe\xff",
    "no object": lambda data: [],
    "no header": lambda data: data.pop("header"),
    "odd header": lambda data: data["header"].update(more=1),
    "no rows": lambda data: data.pop("rows"),
    "rows of 48": lambda data: data["rows"][0]["tile"].update(rows=48),
    "no warps": lambda data: data["rows"][0]["tile"].pop("warps"),
    "true stages": lambda data: data["rows"][0]["tile"].update(stages=True),
    "odd field": lambda data: data["rows"][0]["tile"].update(turbo=1),
    "tile of numbers": lambda data: data["rows"][0].update(tile=[64, 64]),
    "unknown kernel": lambda data: data["rows"][0]["kind"].update(kernel="forward"),
    "unknown dtype": lambda data: data["rows"][0]["kind"].update(dtype=["bfloat16"]),
    "no group": lambda data: data["rows"][0]["kind"].update(group=0),
    "no time": lambda data: data["rows"][0].update(microseconds=None),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_file_that_cannot_be_read_is_named_with_the_remedy(how: str, device: torch.device) -> None:
    path = tuned_file.keep(device, [row_of(1)])
    data = json.loads(path.read_bytes())
    result = BROKEN[how](data)
    path.write_bytes(b"" if how == "empty" else result if isinstance(result, bytes) else json.dumps(data).encode())
    if how == "no object":
        path.write_text("[]")
    call = random_call(device, q_length=20, right=0)
    with pytest.raises(BackendError) as caught:
        BACKEND.attend(call)
    assert caught.value.what.startswith(f"the tuned tiles in {path} cannot be read: ")
    assert caught.value.fix == "delete that file, or run: sinkhold tune --reset"
    with pytest.raises(BackendError, match="cannot be read"):
        tune(SHAPE, ["decode"], ["short"], device, clock=lambda run: 1.0)
    assert tuned_file.remove() == [path]
    BACKEND.attend(call)


def test_a_folder_in_the_files_place_is_an_error_too(device: torch.device) -> None:
    tuned_file.path_of(device).mkdir(parents=True)
    with pytest.raises(BackendError, match="cannot be read: Is a directory"):
        tuned_file.tuned_tiles(device)


@pytest.mark.parametrize("field", ["triton", "kernels", "device"])
def test_a_file_measured_with_something_else_is_left_out_and_said_once(
    field: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    path = tuned_file.keep(device, [row_of(1)])
    data = json.loads(path.read_bytes())
    data["header"][field] = "2.0.0"
    data["rows"][0]["tile"]["rows"] = 48 if field != "device" else 32
    path.write_text(json.dumps(data))
    call = random_call(device, q_length=20, right=0)
    with caplog.at_level(logging.WARNING, logger="adapter"):
        for _ in range(3):
            BACKEND.attend(call)
    (record,) = caplog.records
    assert record.name == "adapter.kernels.tuned_file"
    assert str(path) in record.getMessage()
    assert "not used; run sinkhold tune again" in record.getMessage()
    tuned_file.keep(device, [row_of(2)])
    choice.forget()
    assert [kind.group for kind in tuned_file.tuned_tiles(device)] == [2]


def test_the_disk_is_read_once(device: torch.device, monkeypatch: Any) -> None:
    tuned_file.keep(device, [row_of(1)])
    reads: list[Path] = []
    read = tuned_file.read
    monkeypatch.setattr(tuned_file, "read", lambda path: reads.append(path) or read(path))
    for length in (18, 19, 20):
        BACKEND.attend(random_call(device, q_length=length, right=0))
    assert len(reads) == 1


def test_the_switch_leaves_the_file_unread(device: torch.device, monkeypatch: Any) -> None:
    tuned_file.keep(device, [row_of(1)]).write_text("broken")
    monkeypatch.setenv("SINKHOLD_TUNED", "0")
    assert tuned_file.tuned_tiles(device) == {}


def test_without_a_home_kernels_run_and_nothing_can_be_kept(device: torch.device, monkeypatch: Any) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert tuned_file.tuned_tiles(device) == {}
    with pytest.raises(BackendError, match="no home folder to keep tuned tiles in") as caught:
        tuned_file.keep(device, [row_of(1)])
    assert caught.value.fix == "set XDG_CACHE_HOME to a folder"


@pytest.mark.parametrize("given", ["", "relative/folder"])
def test_the_cache_folder_is_that_of_the_user(given: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned_file.folder() == tmp_path / ".cache" / "sinkhold" / "tiles"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 1)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_generation_without_a_table_runs_on_that_of_8_0(capability: tuple[int, int], kernel: Kernel) -> None:
    for width in (64, 128, 256, 512):
        for itemsize in (2, 4):
            for windowed in (False, True):
                tile = tile_for(kernel, capability, width, itemsize, windowed, 1024)
                assert tile == tile_for(kernel, (8, 0), width, itemsize, windowed, 1024)
                assert not tile.gluon, "the kernel for Hopper compiles on 9.0 only"
    assert tile_for("prefill", (9, 0), 64, 2, False, 1024).gluon


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_grids_are_possible_and_begin_with_the_shipped_tile(capability: tuple[int, int], kernel: Kernel) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for width in (64, 128, 256, 512):
            for windowed in (False, True):
                kind = Kind(kernel, dtype, width, width, 8, windowed, "middle")
                tiles = candidates(kind, capability, 4096)
                assert tiles[0] == tile_for(kernel, capability, width, dtype.itemsize, windowed, 4096)
                assert 2 < len(tiles) == len(set(tiles)) < 40
                assert all(tile.gluon is False for tile in tiles) or capability == (9, 0)


class Slow:
    """A Triton function that takes its time to compile."""

    arg_names = ("Q", "stride", "length", "GROUP", "WIDTH", "num_warps")
    __module__ = "adapter.kernels.hopper"

    def __init__(self, seconds: float) -> None:
        self.seconds, self.calls = seconds, 0

    def __getitem__(self, grid: Any) -> Callable[..., Slow]:
        def run(*arguments: Any, **options: Any) -> Slow:
            self.calls += 1
            if options:
                time.sleep(self.seconds)
            return self

        return run


def test_a_long_compilation_is_said_and_a_short_one_is_not(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(compiling, "EVERY", 0.1)
    query, tile = torch.empty(16, device="meta"), Tile(64, 64, 4, 2)
    slow, quick = Slow(0.25), Slow(0.0)
    with caplog.at_level(logging.WARNING, logger="adapter"):
        for kernel in (slow, quick):
            for length in (1, 2):
                launching.launch(kernel, (1, 1, 1), (query,), (1,), (length,), (8, 192, 4), tile)
    assert (slow.calls, quick.calls) == (2, 2)
    lines = [(r.name, r.getMessage()) for r in caplog.records]
    first = "compiling the hopper kernel for head dim 192, 0 s so far"
    assert lines == [("adapter.kernels.compiling", first)] * 2
    assert not [t for t in threading.enumerate() if t.name.startswith("compiling")]


def test_a_compilation_that_fails_ends_its_line(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(compiling, "EVERY", 0.05)
    with pytest.raises(OutOfResources), compiling.compiling(Slow(0), (8, 64), torch.device("meta")):
        raise OutOfResources(1, 0, "shared memory")
    time.sleep(0.12)
    assert not caplog.records


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_tuning_a_small_kind(kernel: Kernel, device: torch.device, monkeypatch: Any) -> None:
    shape = LayerShape(8, 2, 64, 64, torch.bfloat16, window=128)
    few = candidates(shape.kind(kernel, "short"), tuning.capability_of(device), 4096)[:4]
    monkeypatch.setattr("adapter.backends.autotune.candidates", lambda *arguments: few)
    said: list[Any] = []
    (row,) = tune(shape, [kernel], ["short"], say=said.append)
    assert row.tile in few
    assert 0 < row.microseconds < 1e5
    assert not [t.problem for t in said if isinstance(t, Trial) and t.problem]
    fixed = few[1] if row.tile == few[0] else row.tile
    tuned_file.keep(torch.device("cuda", torch.cuda.current_device()), [TunedRow(row.kind, fixed, 1.0, 2.0)])
    choice.forget()
    query = torch.empty(1, 8, 1024, 64, dtype=torch.bfloat16, device=device)
    assert choice.tile_on(kernel, query, query, 2, 1024, True) == fixed
    assert choice.tile_on(kernel, query, query, 2, 1024, False) != fixed or fixed == few[0]
