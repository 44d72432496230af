"""Models of PEFT: what ``lightning-pp-export`` writes is read by ``from_pretrained`` of peft and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from pipelined_fit import trainer
from pool import WorkerPool
from safetensors.torch import load_file
from test_export import ARCHITECTURES, Tokens, exported, refused
from torch.utils.data import DataLoader

from lightning_pp import PipelineParallelStrategy
from lightning_pp.recipes.causal_lm import CausalLM

MODULE = ("--module", "lightning_pp.recipes.causal_lm:CausalLM")
OWN = ("--module", f"{__name__}:OwnModule")
TOKENS = torch.arange(8).unsqueeze(0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of small Llama weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("base") / "llama"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **ARCHITECTURES["llama"])).save_pretrained(folder)
    return folder


def lora_fit(base: Path, num_processes: int, path: Path | None) -> tuple[float, dict[str, torch.Tensor]]:
    """Trains an adapter on Llama; its A is not that of the seed, so that B gets a gradient that can be compared."""
    lora = {"r": 2, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"], "use_dora": True}
    module = CausalLM(directory=str(base), lora=lora, learning_rate=0.01, num_warmup_steps=1)
    module.configure_model()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(torch.linspace(-0.3, 0.4, parameter.numel()).view(parameter.shape))
    pipeline = PipelineParallelStrategy(2, num_microbatches=2, check_first_batches=False)
    run = trainer(num_processes, pipeline if num_processes > 1 else "auto", max_epochs=2)
    run.fit(module, DataLoader(Tokens(), batch_size=8))
    if path is not None:
        run.save_checkpoint(path)
    trained = {name: value.detach().clone() for name, value in module.named_parameters() if value.requires_grad}
    return float(run.callback_metrics["train_loss"]), trained


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(TOKENS).logits
    return result


def test_adapter_that_a_pipeline_trained(
    pool: WorkerPool, tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the adapter that one device trains; alone and merged it is read by its readers, and gives its logits."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = tmp_path / "last.ckpt"
    first, last = pool.run(lora_fit, base, 2, path)
    loss, trained = lora_fit(base, 1, None)
    assert first[0] == last[0] == pytest.approx(loss, abs=1e-5)
    parts = {**first[1], **last[1]}
    assert parts.keys() == trained.keys() and len(first[1]) < len(parts)
    for name, value in trained.items():
        torch.testing.assert_close(parts[name], value, atol=2e-5, rtol=1e-4)

    exported(capsys, path, tmp_path / "plain.ckpt")
    module = CausalLM.load_from_checkpoint(tmp_path / "plain.ckpt", weights_only=True)
    expected = logits(module.model)
    assert f"for the base model {base}" in exported(capsys, path, tmp_path / "adapter", *MODULE)
    assert sorted(f.name for f in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["inference_mode"] is True
    module.model.save_pretrained(tmp_path / "by_peft")
    own, theirs = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("adapter", "by_peft"))
    assert own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(logits(plain), expected, atol=1e-3)
    assert torch.equal(logits(PeftModel.from_pretrained(plain, tmp_path / "adapter")), expected)

    told = exported(capsys, path, tmp_path / "merged", *MODULE, "--merge", "--max-shard-size", "4KB")
    assert "merged with adapter 'default'" in told
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched"))
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)


class OwnModule(pl.LightningModule):
    """Any module with a model of PEFT in it, as the test has made it."""

    made: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.net = type(self).made()


def saved(make: Any, path: Path) -> Any:
    """A checkpoint of ``make()``, whose class the export then finds under the name :data:`OWN`."""
    OwnModule.made = staticmethod(make)
    torch.manual_seed(1)
    module = OwnModule()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    torch.save({"state_dict": module.state_dict()}, path)
    return module.net


def made(model_type: str, lora: dict[str, Any], added: bool = False, **config: Any) -> Any:
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**ARCHITECTURES.get(model_type, {}), **config})
    )
    if added:
        try:
            model.add_adapter(LoraConfig(**lora))
        except ValueError:  # transformers 5.24 asks for a PEFT that is not out; it does this
            inject_adapter_in_model(LoraConfig(**lora), model, "default")
        return model
    return get_peft_model(model, LoraConfig(**lora))


MIXTRAL = {**ARCHITECTURES["llama"], "num_local_experts": 2}
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "transposed layers": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}, False),
    "an added adapter": ("llama", {"target_modules": ["v_proj"]}, True),
    "parameters of experts": (
        "mixtral",
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        False,
    ),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_other_models(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model_type, lora, added = CASES[case]
    config = MIXTRAL if model_type == "mixtral" else {}
    model = saved(lambda: made(model_type, {"r": 2, **lora}, added, **config), tmp_path / "a.ckpt")
    expected = logits(model)
    exported(capsys, tmp_path / "a.ckpt", tmp_path / "merged", *OWN, "--merge")
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched"))
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)

    assert "its base model has no name" in exported(capsys, tmp_path / "a.ckpt", tmp_path / "adapter", *OWN)
    fresh = made(model_type, {"r": 2, **lora}, **config).unload()
    fresh.load_state_dict(
        {n.replace("base_layer.", ""): v for n, v in _base(model).items() if "lora_" not in n}, strict=True
    )
    assert torch.equal(logits(PeftModel.from_pretrained(fresh, tmp_path / "adapter")), expected)


def _base(model: Any) -> dict[str, torch.Tensor]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    state: dict[str, torch.Tensor] = base.state_dict()
    return state


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written that a reader would take for something else."""
    path = tmp_path / "a.ckpt"
    target = tmp_path / "out"
    saved(lambda: made("llama", {"r": 2, "target_modules": ["q_proj"]}), path)
    assert "holds a model of PEFT" in refused(capsys, path, target)
    OwnModule.made = staticmethod(lambda: made("llama", {"r": 3, "target_modules": ["q_proj", "v_proj"]}))
    message = refused(capsys, path, target, *OWN)
    assert "names are missing" in message and "have another shape" in message and "(3, 16) in the model" in message
    OwnModule.made = staticmethod(lambda: made("llama", {"r": 2, "target_modules": ["q_proj"]}, num_hidden_layers=1))
    assert "names are unexpected" in refused(capsys, path, target, *OWN, "--merge")
    assert "the adapters default" in refused(capsys, path, target, *OWN, "--adapter", "other")
    assert "a .ckpt keeps its layers" in refused(capsys, path, tmp_path / "out.ckpt", "--merge")

    def thawed() -> Any:
        model = made("llama", {"r": 2, "target_modules": ["q_proj"]})
        return model.requires_grad_(True)

    saved(thawed, path)
    assert "were trained too" in refused(capsys, path, target, *OWN)
    saved(lambda: made("gpt2", {"r": 2, "target_modules": ["wte"]}), path)
    assert "transformer.wte.weight, which are tied in" in refused(capsys, path, target, *OWN, "--merge")
    exported(capsys, path, target, *OWN)
    assert len(load_file(target / "adapter_model.safetensors")) == 2
