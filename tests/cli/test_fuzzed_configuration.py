"""Random overrides: a strategy that is built, or an error of the configuration that names what is wrong."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_pp import PipelineParallelStrategy
from lightning_pp.cli.problems import OWN_ERRORS, UserError, check_choices, user_errors
from lightning_pp.cli.run import Run
from lightning_pp.conf import build
from lightning_pp.conf.schema import (
    ByteGPTConf,
    ByteTextDataModuleConf,
    CheckpointConf,
    PipelineMonitorConf,
    PipelineParallelStrategyConf,
    RunConf,
    TrainerConf,
)
from lightning_pp.errors import ConfigurationError
from lightning_pp.schedule import available_schedules

FIELDS = {
    name: value for name, value in vars(PipelineParallelStrategyConf()).items() if name not in ("_target_", "timeout")
}
WORDS = [*available_schedules(), "auto", "error", "skip", "ignore", "full_shard", "shard_grad_op", "no_shard", "gloo"]

numbers = st.one_of(st.integers(-3, 9), st.sampled_from([10**12, -(10**12), 2**70]), st.floats())
words = st.one_of(st.sampled_from(WORDS), st.sampled_from(["", " ", "nope.csv", "/dev/null", "0", "-1", "None"]))
scalars = st.one_of(st.none(), st.booleans(), numbers, words)
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(st.sampled_from(["blocks.0", "forward", "a", ""]), scalars, max_size=2),
)
overrides = st.dictionaries(st.sampled_from(sorted(FIELDS)), values, min_size=1, max_size=3)


def check(fields: dict[str, Any], make: Any) -> None:
    """``make`` gives a strategy, or an error of the configuration, of Hydra or of OmegaConf that names a field."""
    built = told = None
    try:
        built = make()
    except InstantiationException as error:
        told = error.__cause__
    except (*OWN_ERRORS, OmegaConfBaseException, HydraException) as error:
        told = error
    if told is None:
        assert isinstance(built, PipelineParallelStrategy)
        return
    assert isinstance(told, (*OWN_ERRORS, OmegaConfBaseException, HydraException)), f"{fields}: {told!r}"
    assert any(_named(name, value, str(told)) for name, value in fields.items()), f"{fields}: {told}"


def _named(name: str, value: Any, text: str) -> bool:
    return name in text or (isinstance(value, str) and value.strip() != "" and value in text)


@settings(max_examples=80, deadline=timedelta(seconds=20), suppress_health_check=[HealthCheck.too_slow])
@given(fields=overrides)
def test_fields_of_the_strategy(fields: dict[str, Any]) -> None:
    def make() -> Any:
        config = OmegaConf.structured(PipelineParallelStrategyConf)
        for name, value in fields.items():
            OmegaConf.update(config, name, value)
        return build(config)

    check(fields, make)


@settings(max_examples=30, deadline=timedelta(seconds=10), suppress_health_check=[HealthCheck.too_slow])
@given(seconds=st.one_of(numbers, words, st.none()))
def test_timeouts(seconds: Any) -> None:
    def make() -> Any:
        config = OmegaConf.structured(PipelineParallelStrategyConf)
        OmegaConf.update(config, "timeout.seconds", seconds)
        return build(config)

    check({"timeout": seconds, "seconds": seconds}, make)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 1e300, 1e12])
def test_a_timeout_that_nobody_can_wait_is_refused(seconds: float) -> None:
    config = OmegaConf.structured(PipelineParallelStrategyConf)
    config.timeout.seconds = seconds
    with pytest.raises(InstantiationException) as caught:
        build(config)
    assert isinstance(caught.value.__cause__, ConfigurationError) and "timeout" in str(caught.value.__cause__)


# what the command line may be given: every name that is there and some that are not, values of all types
NAMES = [
    *(f"trainer.{field.name}" for field in dataclasses.fields(TrainerConf)),
    *(f"strategy.{field.name}" for field in dataclasses.fields(PipelineParallelStrategyConf)),
    *(f"model.{field.name}" for field in dataclasses.fields(ByteGPTConf)),
    *(f"data.{field.name}" for field in dataclasses.fields(ByteTextDataModuleConf)),
    *(f"callbacks.checkpoint.{field.name}" for field in dataclasses.fields(CheckpointConf)),
    *(f"callbacks.pipeline_monitor.{field.name}" for field in dataclasses.fields(PipelineMonitorConf)),
    *(field.name for field in dataclasses.fields(RunConf)),
    *("strategy.timeout.seconds", "callbacks.nope", "callbacks.nope._target_", "recipe", "trainer.nope", "nope"),
]
PIECES = st.one_of(
    st.sampled_from(
        ["1", "0", "-1", "2.5", "1e400", "nan", "null", "true", "auto", "''", "none", "byte_gpt", "os.system"]
    ),
    st.sampled_from(["[a,b]", "[1,[2]]", "{a: 1}", "${seed}", "${nope}", "${oc.env:NOPE}", "{_target_: os.system}"]),
    st.sampled_from(
        ["{_target_: torch.nn.ReLU}", "{_target_: 3}", "[", "{", "a=b", "\\", "'", "${", "é", "1,2", "???"]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=6),
)
PREFIXES = st.sampled_from(["", "", "", "+", "++", "~"])


SMALL = [
    *("model.num_layers=2", "model.dim=16", "model.num_heads=2", "data.max_bytes=4096", "logger=none"),
    f"data.files=['{__file__}']",
]


@pytest.fixture
def composing(tmp_path: Path) -> Iterator[None]:
    """As in an application of Hydra, and without what a run changes in its process."""
    OmegaConf.register_new_resolver("hydra", lambda key: str(tmp_path), replace=True)
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.fabric", "lightning.pytorch")]
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]
    with warnings.catch_warnings():
        yield
    for logger, (handlers, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
    OmegaConf.clear_resolver("hydra")


@settings(
    max_examples=10,
    deadline=timedelta(seconds=20),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example(given_overrides=[("", "trainer.limit_val_batches", "0"), ("+", "callbacks.nope", "1")])
@given(given_overrides=st.lists(st.tuples(PREFIXES, st.sampled_from(NAMES), PIECES), min_size=1, max_size=2))
def test_overrides_of_the_command_line(given_overrides: list[tuple[str, str, str]], composing: None) -> None:
    texts = [f"{prefix}{name}={value}" for prefix, name, value in given_overrides]
    told = None
    try:
        check_choices(texts)
        with initialize_config_module("lightning_pp.conf", version_base="1.3"):
            config = compose("config", overrides=[*SMALL, *texts])
        with user_errors():
            assert Run.build(config).trainer is not None
    except (HydraException, OmegaConfBaseException, UserError) as error:
        told = error
    finally:
        GlobalHydra.instance().clear()
    # what is raised while something is built is told in a sentence, or the command shows its traceback
    assert not isinstance(told, InstantiationException), f"{texts}: {told!r} from {told.__cause__!r}"
    assert told is None or str(told).strip(), texts
