"""Every recipe and every option of every config group: composes, builds, and trains a tiny step."""

from __future__ import annotations

import dataclasses
import inspect
import io
import math
import pydoc
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException
from omegaconf import MISSING, DictConfig, OmegaConf
from pool import WorkerPool
from rich.console import Console

from lightning_pp import PipelineParallelStrategy
from lightning_pp.cli.plan.run import make_plan
from lightning_pp.conf import Mode, build, schema
from lightning_pp.conf.fields import helps
from lightning_pp.conf.schema import PipelineParallelStrategyConf, PlanConf, RunConf, VerifyConf
from lightning_pp.conf.search_path import yaml_folders
from lightning_pp.recipes.token_files import TokenWriter

CONF, RECIPES = yaml_folders()
RECIPES /= "recipe"
RECIPE_NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
GROUP_OPTIONS = sorted(
    f"{path.parent.name}/{path.stem}" for path in CONF.glob("*/*.yaml") if path.parent.name != "hydra"
)

LLAMA = [
    *("model.config.vocab_size=256", "model.config.hidden_size=16", "model.config.intermediate_size=32"),
    *("model.config.num_hidden_layers=2", "model.config.num_attention_heads=2"),
    *("model.config.num_key_value_heads=1", "model.config.head_dim=8", "trainer.precision=32-true"),
    "strategy.pipeline_parallel_size=2",
]
#: Overrides that make a recipe a matter of seconds; what they shrink is not what the recipe is about.
TINY = {
    "byte_gpt": ["model.num_layers=2", "model.dim=16", "model.num_heads=2", "model.max_seq_len=16"],
    "gpt2_124m": [
        *("model.config.vocab_size=256", "model.config.n_positions=16", "model.config.n_embd=16"),
        *("model.config.n_layer=2", "model.config.n_head=2", "trainer.precision=32-true"),
    ],
    "llama": LLAMA,
    "llama_8b": LLAMA,
    "llama_70b": LLAMA,
    "moe": [
        *("model.config.vocab_size=256", "model.config.hidden_size=16", "model.config.intermediate_size=8"),
        *("model.config.num_hidden_layers=2", "model.config.num_attention_heads=2", "model.config.num_experts=4"),
        *("model.config.num_key_value_heads=2", "model.config.num_experts_per_tok=2", "trainer.precision=32-true"),
        "strategy.pipeline_parallel_size=2",
    ],
    "t5": [
        *("model.config.d_model=16", "model.config.d_ff=32", "model.config.d_kv=8", "model.config.num_heads=2"),
        *("model.config.num_layers=2", "model.config.num_decoder_layers=2", "trainer.precision=32-true"),
        *("model.config.vocab_size=264", "data.num_spans=2", "data.span_length=2"),
    ],
    "vit": [
        *("model.config.image_size=16", "model.config.patch_size=8", "model.config.hidden_size=16"),
        *("model.config.num_hidden_layers=2", "model.config.num_attention_heads=2"),
        *("model.config.intermediate_size=32", "data.image_size=16", "data.num_train_images=16"),
        *("data.num_val_images=4", "trainer.precision=32-true"),
    ],
    "lora": ["trainer.precision=32-true"],
    "two_tower": ["model.num_layers=1", "model.dim=16", "model.num_heads=2", "model.max_seq_len=8"],
    "causal_lm": ["model.model_type=gpt2", "+model.config={n_embd: 16, n_layer: 2, n_head: 2, vocab_size: 256}"],
    "own": ["model._target_=lightning_pp.recipes.byte_gpt.ByteGPT", "+model.num_layers=2", "+model.dim=16"],
}
TINY_RUN = [
    *("trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_steps=2", "trainer.val_check_interval=2"),
    *("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "trainer.default_root_dir=null"),
    *("data.batch_size=4", "strategy.num_microbatches=2", "trainer.precision=32-true"),
    *("logger=none", "callbacks=none", "+trainer.enable_checkpointing=false"),
]
TINY_TEXT = ["data.seq_len=16", "data.num_val_crops=4", "data.max_bytes=100000"]
#: The loss by guessing: of a byte, of a class, of the other half in a batch of four.
GUESSED = {"vit": math.log(10), "two_tower": 2 * math.log(4)}  # untrained towers do not give equal logits
#: What an option cannot be without.
NEEDED = {
    "model/lora": ["model.model_type=gpt2"],
    "model/causal_lm": ["model.model_type=gpt2"],
    "model/own": ["model._target_=lightning_pp.recipes.byte_gpt.ByteGPT"],
    "data/own": ["data._target_=lightning_pp.recipes.byte_text.ByteTextDataModule"],
}


@pytest.fixture(autouse=True)
def no_leaked_hydra() -> Iterator[None]:
    yield
    GlobalHydra.instance().clear()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of small GPT-2 weights, to fine-tune."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("base") / "gpt2"
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, vocab_size=256)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def tiny(recipe: str, base: Path) -> list[str]:
    """Overrides for a run of seconds on two processes."""
    text = [] if recipe == "vit" else TINY_TEXT
    given = [f"model.directory={base}"] if recipe == "lora" else []
    return [f"recipe={recipe}", *TINY_RUN, *text, *TINY[recipe], *given]


def written_tokens(folder: Path) -> Path:
    writer = TokenWriter(folder / "tokens", vocab_size=256)
    writer.add([range(256)] * 100)
    writer.finish(tokenizer="byte", end=None, sources=[])
    return folder / "tokens"


def composed(*overrides: str, name: str = "config") -> DictConfig:
    with initialize_config_module("lightning_pp.conf", version_base="1.3"):
        return compose(name, overrides=list(overrides))


def test_there_are_recipes_and_groups() -> None:
    assert {"byte_gpt", "gpt2_124m", "llama"} <= set(RECIPE_NAMES)
    assert {option.split("/")[0] for option in GROUP_OPTIONS} == {
        *("trainer", "strategy", "schedule", "model", "optimizer", "data", "logger", "callbacks", "launcher")
    }


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_recipe_has_a_header_and_overrides_only(recipe: str) -> None:
    text = (RECIPES / f"{recipe}.yaml").read_text()
    header = text.split("\n\n")[0] if "defaults:" not in text.split("\n\n")[0] else text.split("defaults:")[0]
    for entry in ("# @package _global_", "# Command ", "# Hardware ", "# Expect "):
        assert entry in header
    assert "_target_" not in text.split("defaults:")[1]
    assert "parts/by_steps" in text or re.search(r"^  - (byte_gpt|llama)", text, re.MULTILINE)  # no copies
    groups = {key for key in OmegaConf.create(text) if key != "defaults"}
    assert groups <= {"trainer", "strategy", "model", "data", "logger", "callbacks"}


def test_help_names_every_recipe_option_and_value_there_is() -> None:
    helps = CONF / "hydra" / "help"
    text = (helps / "lightning_pp.yaml").read_text()
    told = re.findall(r"^    (\w+) +([\w, ]+?)(?:: .*)?$", text.split("Groups and their options:")[1], re.MULTILINE)
    options = sorted(f"{group}/{name}" for group, names in told for name in names.split(", "))
    assert options == sorted([*GROUP_OPTIONS, *(f"recipe/{name}" for name in RECIPE_NAMES)])
    values = {field.name for field in fields(PlanConf)} - {field.name for field in fields(RunConf)}
    plan = " ".join((helps / "lightning_pp_plan.yaml").read_text().split())
    assert set(plan.split("these options: ")[1].rstrip(".").split(", ")) == values
    verify = " ".join((helps / "lightning_pp_verify.yaml").read_text().split())
    assert {verify.split("this option: ")[1].rstrip(".")} == {f.name for f in fields(VerifyConf)} - {
        f.name for f in fields(RunConf)
    }


@pytest.mark.parametrize("option", GROUP_OPTIONS)
def test_option_is_valid_alone(option: str, tmp_path: Path) -> None:
    group = option.split("/")[0]
    needed = NEEDED.get(option, [])
    if option in ("data/tokens", "data/packed_tokens"):
        needed = [f"data.directory={written_tokens(tmp_path)}", "data.seq_len=16"]
    if option == "data/stream":
        (tmp_path / "lines.txt").write_text("one\n")
        needed = ["data.path=text", f"data.data_files={tmp_path / 'lines.txt'}"]
    config = composed(*needed, name=option)
    OmegaConf.clear_resolver("hydra")  # in an application Hydra gives the output folder
    OmegaConf.register_new_resolver("hydra", lambda key: str(tmp_path), replace=True)
    if group == "schedule":
        strategy = build({"_target_": "lightning_pp.PipelineParallelStrategy", **config.strategy})
        assert isinstance(strategy, PipelineParallelStrategy)
        assert config.strategy.schedule == option.split("/")[1]
        return
    if group == "optimizer":
        optimizer = build(config.model.optimizer)([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)
        assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.param_groups[0]["lr"] == 0.1
        return
    section = config[group] if group in config else OmegaConf.create({})
    missing = OmegaConf.missing_keys(section)
    assert not missing
    if group == "launcher":
        assert section.name == option.split("/")[1]
    elif option == "trainer/gpu":
        assert section.accelerator == "gpu"
    elif group == "callbacks":
        callbacks = build(section)
        assert set(callbacks) == {"default": {"checkpoint", "pipeline_monitor"}, "none": set()}.get(
            option.split("/")[1], {option.split("/")[1]}
        )
        assert all(hasattr(callback, "on_train_start") for callback in callbacks.values())
    else:
        assert build(section) is not None


def test_groups_of_the_default_run_build_what_they_name() -> None:
    config = composed("strategy.num_microbatches=4", "strategy.timeout.seconds=60", "strategy.schedule=1f1b")
    assert config.mode is Mode.fit
    strategy = build(config.strategy)
    assert isinstance(strategy, PipelineParallelStrategy)
    assert build(composed("strategy=auto").strategy) == "auto"


def test_data_files_are_a_list_on_the_command_line() -> None:
    assert list(composed("data.files=[my.txt, more/*.md]").data.files) == ["my.txt", "more/*.md"]


def train(config_yaml: str) -> dict[str, Any]:
    """One rank's run of a composed config."""
    from lightning_pp.cli.run import Run

    config = OmegaConf.create(config_yaml)
    assert isinstance(config, DictConfig)
    config.mode = Mode.fit
    run = Run.build(config)
    run.execute()
    return {
        "steps": run.trainer.global_step,
        "metrics": {name: float(value) for name, value in run.trainer.callback_metrics.items()},
        "optimizer": (type(optimizer := run.trainer.optimizers[0]).__name__, optimizer.defaults.get("momentum")),
        "owned": [name for name, _ in run.model.named_parameters()],
    }


@pytest.mark.nightly
def test_a_recipe_in_float8_plans_and_trains_as_a_pipeline(pool: WorkerPool, base: Path) -> None:
    stream = io.StringIO()
    overrides = [*tiny("llama", base), "model.float8=rowwise"]
    assert make_plan(composed(*overrides, "device=a10g", "schedules=[zb_h1]", name="plan"), Console(file=stream))
    assert "float8 at the same rate, since its own is not known" in " ".join(stream.getvalue().split())
    first, last = pool.run(train, OmegaConf.to_yaml(composed(*overrides), resolve=True), world_size=2, timeout=120)
    assert first["steps"] == last["steps"] == 2
    assert math.log(256) / 2 < first["metrics"]["val_loss"] < 2 * math.log(256)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.float8=e4m3"], "float8='e4m3' is none of 'tensorwise', 'rowwise' and 'rowwise_with_gw_hp'"),
        (["model.float8=rowwise", "model.lora={r: 4}"], "float8 and lora are both given"),
    ],
)
def test_float8_that_cannot_be_is_refused(base: Path, overrides: list[str], told: str) -> None:
    with pytest.raises(InstantiationException, match=told):
        build(composed(*tiny("llama", base), *overrides).model)


# by day tests/cli trains byte_gpt, and plans it
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name == "lora" else [pytest.mark.nightly]) for name in RECIPE_NAMES]
)
def test_recipe_plans_and_trains_as_a_pipeline(recipe: str, pool: WorkerPool, base: Path) -> None:
    stream = io.StringIO()
    hardware = ["device=a10g", "schedules=[zb_h1]"]
    plan = make_plan(composed(*tiny(recipe, base), *hardware, name="plan"), Console(file=stream))
    assert plan is not None
    assert re.search(r"zb_h1 +│ +2 │ +[0-9.]+ │", stream.getvalue()), "no step time"
    assert "Estimated memory of each rank" in stream.getvalue()

    config = composed(*tiny(recipe, base))
    first, last = pool.run(train, OmegaConf.to_yaml(config, resolve=True), world_size=2, timeout=120)
    assert first["steps"] == last["steps"] == 2
    assert first["metrics"] == last["metrics"]
    guessed = GUESSED.get(recipe, math.log(256))
    assert guessed / 2 < first["metrics"]["val_loss"] < 2 * guessed
    assert first["owned"] != last["owned"]


def test_optimizer_of_the_group_trains_a_recipe(pool: WorkerPool, base: Path) -> None:
    chosen = ["optimizer=sgd", "schedule=1f1b", "model.optimizer.momentum=0.5", "trainer.devices=1"]
    config = composed(*tiny("byte_gpt", base), *chosen)
    assert config.strategy.schedule == "1f1b"
    (first,) = pool.run(train, OmegaConf.to_yaml(config, resolve=True), world_size=1, timeout=120)
    assert first["optimizer"] == ("SGD", 0.5)


@pytest.mark.parametrize(
    "conf", [c for c in vars(schema).values() if is_dataclass(c) and c.__module__ == schema.__name__]
)
def test_every_field_has_help(conf: type) -> None:
    told = {field.name: field.metadata.get("help") or helps(conf).get(field.name, "") for field in fields(conf)}
    own = {name: text for name, text in told.items() if not name.startswith("_")}
    assert all(own.values()), own
    # in the words of YAML, not of Python's docstrings
    assert not [text for text in own.values() if re.search(r"``|:\w+:`|(?<!=)\b(None|True|False)\b", text)]


def test_fields_of_the_strategy_are_checked_by_the_types_that_yaml_has() -> None:
    arguments = inspect.signature(PipelineParallelStrategy).parameters
    kinds = {field.name: field.type for field in fields(PipelineParallelStrategyConf) if field.name != "_target_"}
    assert set(kinds) == set(arguments)
    told = {
        "num_microbatches": "int | str",
        "unshard_budget": "int | None",
        "memory_limit_gib": "float | None",
        "units": "list[str] | None",
        "tensor_parallel_plan": "Any",
        "timeout": "TimeoutConf",
        **{name: "bool" for name, argument in arguments.items() if argument.annotation == "bool"},
        **{name: "str" for name, argument in arguments.items() if argument.annotation == "str"},
    }
    assert {name: kinds[name] for name in told} == told


@pytest.mark.parametrize(
    "conf",
    [c for c in vars(schema).values() if is_dataclass(c) and any("help" in field.metadata for field in fields(c))],
)
def test_what_is_read_of_a_class_from_its_source_is_what_the_class_has(conf: Any) -> None:
    built = pydoc.locate(conf._target_)
    assert callable(built)
    arguments = {
        name: each for name, each in inspect.signature(built).parameters.items() if each.kind is not each.VAR_KEYWORD
    }
    told = {field.name: field for field in fields(conf) if field.name != "_target_"}
    assert told.keys() >= arguments.keys()
    for name, argument in arguments.items():
        if told[name].default is dataclasses.MISSING or told[name].default == MISSING:
            assert argument.default in (None, (), argument.empty), (
                name
            )  # YAML's lists and dicts, and what must be given
        else:
            assert told[name].default == argument.default, name
    assert isinstance(built, type)
    assert {name: told[name].metadata["help"] for name in arguments} == {name: helps(built)[name] for name in arguments}


def test_help_is_the_docstring_in_the_words_of_yaml() -> None:
    class Documented:
        """Something.

        Args:
            size: Whole; ``"auto"``: found, by :func:`lightning_pp.schedule.build_schedule`. None: none, and
                True as ``f(x=True)``.
            other: More.

        Raises:
            ValueError: Never.
        """

    assert helps(Documented) == {
        "size": "Whole; `auto`: found, by `build_schedule`. null: none, and true as `f(x=True)`.",
        "other": "More.",
    }
