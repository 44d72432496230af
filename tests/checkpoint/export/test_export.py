"""What ``lightning-pp-export`` writes is read by its readers: safetensors, transformers, a plain Trainer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from pipeline_parts import differences, make_part, one_device, save_sharded
from pipelined_fit import trainer
from pool import WorkerPool
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.checkpoint.ownership.catalog import ParameterCatalog
from lightning_pp.checkpoint.ownership.rank_part import RankPart
from lightning_pp.checkpoint.storage.safetensors_file import map_folder, map_safetensors, write_safetensors
from lightning_pp.cli.export import main
from lightning_pp.errors import CheckpointError
from lightning_pp.recipes.causal_lm import CausalLM

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 16},
    "llama": {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "vocab_size": 64,
        "tie_word_embeddings": False,
    },
}


def save(path: Path, steps: list[int], layout: tuple[int, int] = (2, 1), **arguments: Any) -> None:
    part = make_part(layout, **arguments)
    part.train(steps)
    rest = {"epoch": 0, "global_step": 2, "pytorch-lightning_version": pl.__version__, "loops": {}, "callbacks": {}}
    save_sharded(path, part.held, {**rest, "lr_schedulers": [], "kept": torch.arange(3.0)})


def exported(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code != 0
    return capsys.readouterr().err


@pytest.mark.by_day(1)
@pytest.mark.parametrize("optimizer", ["adamw", "row_normalized"])
def test_plain_ckpt_is_what_one_device_saves(
    pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizer: str
) -> None:
    pool.run(save, tmp_path / "a.ckpt", [0, 1], (2, 2), optimizer=optimizer, world_size=4, process_group=True)
    exported(capsys, tmp_path / "a.ckpt", tmp_path / "plain.ckpt")
    expected = one_device([0, 1], optimizer=optimizer)
    for memory_map in (False, True):
        plain = torch.load(tmp_path / "plain.ckpt", weights_only=True, mmap=memory_map)
        assert list(plain["state_dict"]) == list(expected["state_dict"])
        for key in ("state_dict", "optimizer_states"):
            assert not differences(dict(plain[key]) if key == "state_dict" else plain[key], _plain(expected[key]))
        assert torch.equal(plain["kept"], torch.arange(3.0))
        state = plain["state_dict"]
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    exported(capsys, tmp_path / "a.ckpt", tmp_path / "weights.ckpt", "--model-only", "--dtype", "bfloat16")
    weights = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in weights
    assert torch.equal(weights["state_dict"]["norm.weight"], expected["state_dict"]["norm.weight"].bfloat16())
    assert weights["state_dict"]["blocks.0.norm.num_batches_tracked"].dtype is torch.int64


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def test_safetensors(pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Read by the library of that name; tied names are noted as it notes them, and shards are those of the index."""
    pool.run(save, tmp_path / "a.ckpt", [0], (1, 2), process_group=True)
    told = exported(capsys, tmp_path / "a.ckpt", tmp_path / "model.safetensors")
    assert "1 further names of tied ones" in told and "3 entries left out" in told
    state = {name: value for name, value in one_device([0])["state_dict"].items() if torch.is_tensor(value)}
    state.pop("head.weight")
    assert not differences(load_file(tmp_path / "model.safetensors"), state)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    assert not differences(map_safetensors(tmp_path / "model.safetensors"), state)

    exported(capsys, tmp_path / "a.ckpt", tmp_path / "folder", "--max-shard-size", "300", "--dtype", "bfloat16")
    shards = sorted((tmp_path / "folder").glob("*.safetensors"))
    assert len(shards) == 2 and (tmp_path / "folder" / "model.safetensors.index.json").is_file()
    halves = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state.items()}
    assert not differences({name: v for shard in shards for name, v in load_file(shard).items()}, halves)
    assert not differences(dict(sorted(map_folder(tmp_path / "folder").items())), dict(sorted(halves.items())))

    part = {name.removeprefix("blocks."): value for name, value in state.items() if name.startswith("blocks.")}
    exported(capsys, tmp_path / "a.ckpt", tmp_path / "part.safetensors", "--prefix", "blocks.")
    assert not differences(load_file(tmp_path / "part.safetensors"), part)


def test_reading_files_of_the_library(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.tensor(7), "c": torch.empty(0, 4), "d": torch.ones(3).bool()}
    tensors["e"] = torch.randn(5).bfloat16()
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    assert not differences(dict(sorted(map_safetensors(tmp_path / "a.safetensors").items())), tensors)
    content = (tmp_path / "a.safetensors").read_bytes()
    for number, damaged in enumerate((b"", content[:7], content[:60], content[:-4], b"\xff" * 40)):
        file = tmp_path / f"{number}.safetensors"
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged or not a safetensors file"):
            map_safetensors(file)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float4_e2m1fn_x2])
def test_a_dtype_that_the_format_has_not_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match="weight is torch.*give --dtype"):
        write_safetensors(tmp_path / "a.safetensors", {"weight": ((2,), dtype)}, lambda _: torch.empty(2), {})
    assert not list(tmp_path.iterdir())


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(64, (8,), generator=torch.Generator().manual_seed(index))}


def train_causal_lm(path: Path, model_type: str) -> None:
    pl.seed_everything(1, verbose=False)
    module = CausalLM(model_type, ARCHITECTURES[model_type], learning_rate=0.01, num_warmup_steps=1)
    run = trainer(2, PipelineParallelStrategy(2, num_microbatches=2, check_first_batches=False), max_steps=2)
    run.fit(module, DataLoader(Tokens(), batch_size=4))
    run.save_checkpoint(path)


@pytest.mark.by_day(1)  # test_export_peft.py exports Llama
@pytest.mark.parametrize("model_type", list(ARCHITECTURES))
def test_transformers_loads_the_model_directory(
    pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], model_type: str
) -> None:
    """The module named on the command line, the one in the config of the run; tied (GPT-2) and untied (Llama) heads."""
    from transformers import AutoModelForCausalLM

    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    pool.run(train_causal_lm, path, model_type)
    told = exported(
        capsys, path, tmp_path / "hf", "--module", "lightning_pp.recipes.causal_lm:CausalLM", "--max-shard-size", "4KB"
    )
    assert "LMHeadModel" in told or "ForCausalLM" in told
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with pytest.raises(IsADirectoryError):  # Lightning's own, and the docs say what to do
        CausalLM.load_from_checkpoint(path, weights_only=True)
    exported(capsys, path, tmp_path / "plain.ckpt")
    plain = CausalLM.load_from_checkpoint(tmp_path / "plain.ckpt", weights_only=True)
    tokens = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, plain.eval().model(tokens).logits)

    (tmp_path / "run" / ".hydra").mkdir()
    config = f"model:\n  _target_: lightning_pp.recipes.causal_lm.CausalLM\n  model_type: {model_type}\n  config:\n"
    config += "".join(f"    {key}: {value}\n" for key, value in ARCHITECTURES[model_type].items())
    (tmp_path / "run" / ".hydra" / "config.yaml").write_text(config)
    exported(capsys, path, tmp_path / "from_run", "--dtype", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "from_run")
    assert model.dtype is torch.bfloat16 and model.config.architectures == [type(model).__name__]

    other = ARCHITECTURES[model_type] | {"n_layer": 3, "num_hidden_layers": 3, "vocab_size": 65}
    config = config.partition("  config:\n")[0] + "  config:\n"
    config += "".join(f"    {key}: {value}\n" for key, value in other.items())
    (tmp_path / "run" / ".hydra" / "config.yaml").write_text(config)
    message = refused(capsys, path, tmp_path / "other")
    assert "names are missing: " in message and "have another shape: " in message and "(65, 16) in the model" in message


def test_refusals(pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(save, path, [0], process_group=True)
    assert "does not exist" in refused(capsys, tmp_path / "b.ckpt", tmp_path / "x.ckpt")
    assert "is not a complete checkpoint" in refused(capsys, tmp_path, tmp_path / "x.ckpt")
    (tmp_path / "file.ckpt").write_text("nothing")
    assert "is damaged or not a checkpoint" in refused(capsys, tmp_path / "file.ckpt", tmp_path / "x.ckpt")
    target = tmp_path / "x.safetensors"
    target.write_text("kept")
    assert f"{target} exists" in refused(capsys, path, target)
    assert target.read_text() == "kept"
    exported(capsys, path, target, "--overwrite")
    assert load_file(target)
    assert "starts with 'nothing.'" in refused(capsys, path, tmp_path / "y.safetensors", "--prefix", "nothing.")
    assert "--module" in refused(capsys, path, tmp_path / "hf", "--format", "hf")
    assert "Model does not wrap one" in refused(capsys, path, tmp_path / "hf", "--module", "pipeline_parts:Model")
    assert "has no Other" in refused(capsys, path, tmp_path / "hf", "--module", "pipeline_parts:Other")
    assert "is not a size" in refused(capsys, path, tmp_path / "hf", "--max-shard-size", "many")
    shard = path / "__1_0.distcp"
    shard.rename(tmp_path / "away")
    assert f"{shard} is missing" in refused(capsys, path, tmp_path / "z.safetensors")
    (tmp_path / "away").rename(shard)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.ckpt", "file.ckpt", "x.safetensors"]


LARGE = 40  # matrices of 4 MB


def save_many_matrices(path: Path) -> None:
    """A checkpoint in which no tensor is large and all together are."""
    state = {f"layers.{number}.weight": torch.full((1000, 1000), float(number)) for number in range(LARGE)}
    torch.save({"state_dict": state, "optimizer_states": [], "lr_schedulers": []}, path.with_suffix(".file"))
    catalog = ParameterCatalog(tuple(state), dict.fromkeys(state, (0,)), {n: v.shape for n, v in state.items()})
    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList(torch.nn.Linear(1000, 1000, bias=False) for _ in range(LARGE))
    module.load_state_dict(state)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pipeline", "data_parallel"))
    save_sharded(path, RankPart(module, catalog, mesh), {"epoch": 1})


def memory_of_export(source: Path, target: Path) -> int:
    """What exporting adds to the anonymous memory of the process, at its peak; pages of files are not counted."""
    peak, stop = 0, threading.Event()

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, anonymous())
            stop.wait(0.001)

    main([str(source), str(target.with_stem("warm_up"))])
    before = anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    main([str(source), str(target)])
    stop.set()
    watcher.join()
    return peak - before


@pytest.mark.by_day(1)
@pytest.mark.parametrize("target", ["model.safetensors", "plain.ckpt"])
def test_a_tensor_is_in_memory_at_a_time(pool: WorkerPool, tmp_path: Path, target: str) -> None:
    source = tmp_path / "a.ckpt"
    pool.run(save_many_matrices, source, world_size=1, process_group=True)
    whole = LARGE * 4_000_000
    (added,) = pool.run(memory_of_export, source, tmp_path / target, world_size=1)
    assert added < whole / 4, f"{added / 1e6:.0f} MB for a checkpoint of {whole / 1e6:.0f} MB"
    if target.endswith(".ckpt"):
        state = torch.load(tmp_path / target, weights_only=True)["state_dict"]
    else:
        state = load_file(tmp_path / target)
    assert all(bool((state[f"layers.{number}.weight"] == number).all()) for number in range(LARGE))
