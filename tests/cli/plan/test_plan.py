"""``lightning-pp-plan``: its numbers against counts made another way, its files against who else reads them."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from page_reading import data_of
from planned import BATCH_SIZE, DIM, NUM_LAYERS, NUM_MICROBATCHES, plan_config, planned, read_json
from pool import WorkerPool
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_pp.cli.plan.command import run_plan
from lightning_pp.cli.plan.report import Plan
from lightning_pp.cli.problems import UserError
from lightning_pp.recipes.byte_gpt import ByteGPT
from lightning_pp.schedule import Schedule, StageCosts, available_schedules, build_schedule


@pytest.fixture(autouse=True)
def no_leaked_hydra() -> Any:
    yield
    GlobalHydra.instance().clear()


@pytest.fixture(scope="module")
def whole_plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, str, Path]:
    """A plan of all schedules, what was printed, and its folder."""
    folder = tmp_path_factory.mktemp("plan") / "out"
    plan, text = planned(f"out={folder}")
    return plan, text, folder


def real_model() -> ByteGPT:
    return ByteGPT(num_layers=NUM_LAYERS, dim=DIM, num_heads=2, max_seq_len=32)


def test_parameters_are_those_of_the_model(whole_plan: tuple[Plan, str, Path]) -> None:
    content = read_json(whole_plan[2])
    model = real_model()
    modules = dict(model.named_modules())
    for cut in content["cuts"]:
        assert cut["num_parameters"] == sum(p.numel() for p in model.parameters())
        assert sum(stage["num_parameters"] for stage in cut["stages"]) == cut["num_parameters"]
        assert sum(stage["parameter_bytes"] for stage in cut["stages"]) == 4 * cut["num_parameters"]
        units = [unit for stage in cut["stages"] for unit in stage["units"]]
        assert len(units) == NUM_LAYERS + 4
        for unit in units:
            assert unit["num_parameters"] == sum(p.numel() for p in modules[unit["name"]].parameters())
            assert unit["class_name"] == type(modules[unit["name"]]).__name__


def test_flops_are_those_of_a_real_forward(whole_plan: tuple[Plan, str, Path]) -> None:
    model = real_model()
    plan = whole_plan[0]
    batch = plan.cutter.microbatch.data["input_ids"]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(batch[:, :-1])
    for cut in read_json(whole_plan[2])["cuts"]:
        assert sum(stage["flops"] for stage in cut["stages"]) == counter.get_total_flops()


def test_what_crosses_is_what_a_later_stage_needs(whole_plan: tuple[Plan, str, Path]) -> None:
    num_samples = BATCH_SIZE // NUM_MICROBATCHES
    length = whole_plan[0].cutter.microbatch.data["input_ids"].shape[1] - 1
    blocks = [f"blocks.{layer}" for layer in range(NUM_LAYERS)]
    needed_by = {"embedding": "blocks.0", "position": "blocks.0", **dict(pairwise([*blocks, "norm", "head"]))}
    for cut in read_json(whole_plan[2])["cuts"]:
        stage_of = {unit["name"]: stage["stage"] for stage in cut["stages"] for unit in stage["units"]}
        expected = {
            (unit, stage_of[unit], stage_of[reader])
            for unit, reader in needed_by.items()
            if stage_of[unit] != stage_of[reader]
        }
        assert {(c["value"], c["source"], c["target"]) for c in cut["crossings"]} == expected
        num_bytes_sent = 0
        for crossing in cut["crossings"]:
            shape = [length, DIM] if crossing["value"] == "position" else [num_samples, length, DIM]
            num_bytes = 4 * math.prod(shape)
            assert (crossing["shape"], crossing["dtype"]) == (shape, "float32")
            assert (crossing["forward_bytes"], crossing["gradient_bytes"]) == (num_bytes, num_bytes)
            ranks = [cut["rank_of_stage"][crossing[end]] for end in ("source", "target")]
            num_bytes_sent += 2 * num_bytes * (ranks[0] != ranks[1])
        assert cut["sent_bytes"] == num_bytes_sent


def test_every_schedule_is_compared_and_the_best_is_the_best(whole_plan: tuple[Plan, str, Path]) -> None:
    content = read_json(whole_plan[2])
    names = [schedule["name"] for schedule in content["schedules"]]
    assert set(names) == set(available_schedules())
    assert names.count("auto") == 3  # one stage a rank, two in turn, two in a V
    best = content["schedules"][content["best"]]
    shortest = min(schedule["step_time"] for schedule in content["schedules"])
    assert best["step_time"] <= 1.005 * shortest
    assert all(
        best["time_in_a_row"] <= schedule["time_in_a_row"] + 1e-9
        for schedule in content["schedules"]
        if schedule["step_time"] <= 1.005 * shortest
    )
    for schedule in content["schedules"]:
        cut = content["cuts"][schedule["cut"]]
        assert len(cut["costs"]["forward"]) == len(cut["stages"]) == 2 * schedule["stages_per_rank"]


def test_a_file_for_more_microbatches_is_planned_without_the_missing_ones(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    build_schedule("1f1b", num_ranks=2, num_microbatches=2 * NUM_MICROBATCHES).to_csv(path)
    plan, _ = planned("schedules=[1f1b]", f"strategy.schedule={path}", "show=configured")
    assert plan.shown.name == str(path)
    orders = [[(str(action.kind), action.microbatch) for action in program] for program in plan.shown.schedule.programs]
    assert {microbatch for order in orders for _, microbatch in order} == set(range(NUM_MICROBATCHES))
    last = [[("F", index), ("B", index)] for index in range(NUM_MICROBATCHES)]
    assert orders[1] == [action for pair in last for action in pair]


def test_csv_is_read_by_the_strategy(whole_plan: tuple[Plan, str, Path]) -> None:
    shown, path = whole_plan[0].shown.schedule, whole_plan[2] / "schedule.csv"
    assert Schedule.from_csv(path, name=shown.name) == shown
    plan, _ = planned(f"strategy.schedule={path}", "schedules=[1f1b]", "show=configured")
    assert plan.shown.schedule.programs == shown.programs
    assert plan.shown.step_time == pytest.approx(whole_plan[0].shown.step_time)


def test_files_are_what_they_are_called(whole_plan: tuple[Plan, str, Path]) -> None:
    folder = whole_plan[2]
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["plan.json", "schedule.csv", "schedule.html"]
    assert len(data_of((folder / "schedule.html").read_text())["views"]) == 1
    for name in written:
        assert str(folder / name) in whole_plan[1].replace("\n", "")


def test_report_shows_stages_units_crossings_memory_and_schedules(whole_plan: tuple[Plan, str, Path]) -> None:
    plan, text, _ = whole_plan
    for stage in plan.shown.cut.summary.stages:
        assert f"stage {stage.stage} on rank {stage.rank}: " in text
    for said in ("embedding", "head", "→ stage 1: ", "Estimated memory of each rank", "best", "configured", "relative"):
        assert said in text
    assert all(name in text for name in available_schedules())
    rows = [line for line in text.splitlines() if line.startswith("rank ")]
    assert len(rows) == 2 and all("%" in row for row in rows)


def test_given_costs_give_the_times_of_the_closed_formulas(tmp_path: Path) -> None:
    """Equal stages of F = I = W = 1 ms: 1f1b takes (m + p - 1)(f + i + w), zb_h1 waits (p - 1)(f + i - w)."""
    path = tmp_path / "costs.json"
    StageCosts(1.0, 1.0, 1.0).to_json(path)
    p, m = 2, NUM_MICROBATCHES
    plan, text = planned(f"costs={path}", "schedules=[gpipe,1f1b,zb_h1]", "show=1f1b")
    assert plan.costs.unit == "ms" and f"measured, {path}" in text.replace("\n", "")
    by_name = {one.name: one for one in plan.table.usable}
    assert by_name["1f1b"].step_time == pytest.approx(3 * (m + p - 1))
    assert by_name["gpipe"].step_time == pytest.approx(3 * (m + p - 1))
    assert by_name["zb_h1"].time_in_a_row == pytest.approx(3 * m + (p - 1) * 1)
    assert by_name["1f1b"].bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


def test_measured_stages_give_costs_to_schedules_with_more_stages(tmp_path: Path) -> None:
    """What a stage was measured to take is what its units take together, wherever they are."""
    path = tmp_path / "costs.json"
    StageCosts([10.0, 14.0], [12.0, 15.0], [8.0, 9.0], p2p=0.5).to_json(path)
    plan, _ = planned(f"costs={path}", "schedules=[1f1b,zb_v]")
    for one in plan.table.usable:
        costs = one.cut.costs.per_stage(one.schedule.placement.num_stages)
        assert sum(costs.forward) == pytest.approx(24.0)
        assert sum(costs.backward_input) == pytest.approx(27.0)
        assert sum(costs.backward_weight) == pytest.approx(17.0)
        assert set(costs.p2p) == {0.5}


def test_flops_of_a_device_and_bytes_of_a_link_make_milliseconds() -> None:
    options = ["peak_tflops=2", "efficiency=0.5", "link_gb_per_s=4", "node_link_latency_us=3"]
    plan, text = planned(*options, "schedules=[1f1b]", "show=1f1b")
    assert plan.costs.unit == "ms" and "2 TFLOP/s (peak_tflops) x efficiency 0.5" in " ".join(text.split())
    cut = plan.shown.cut
    costs = cut.costs.per_stage(2)
    for stage in cut.summary.stages:
        assert costs.forward[stage.stage] == pytest.approx(1e3 * stage.flops / 1e12)
    assert "transfers at 4 GB/s and 3 µs" in " ".join(text.split())
    crossing = cut.summary.crossings[0]
    assert costs.p2p == pytest.approx([0.003 + 1e3 * crossing.forward_bytes / 4e9, 0.0])
    assert costs.p2p_back == pytest.approx([0.0, 0.003 + 1e3 * crossing.gradient_bytes / 4e9])


def test_messages_between_nodes_take_the_time_of_their_link(tmp_path: Path) -> None:
    """Four ranks on two nodes: the second edge goes from one to the other."""
    only = ["trainer.devices=2", "trainer.num_nodes=2", "peak_tflops=2", "schedules=[1f1b]", "show=1f1b"]
    options = ["link_gb_per_s=2", "link_latency_us=70", "node_link_gb_per_s=50", "node_link_latency_us=5"]
    plan, text = planned(*only, *options)
    assert "50 GB/s and 5 µs in a node of 2, 2 GB/s and 70 µs between nodes" in " ".join(text.split())
    num_bytes = plan.shown.cut.summary.crossings[0].forward_bytes
    inside, between = 0.005 + 1e3 * num_bytes / 50e9, 0.07 + 1e3 * num_bytes / 2e9
    costs = plan.shown.cut.costs.per_stage(4)
    assert costs.p2p == pytest.approx((inside, between, inside, 0.0))
    assert costs.p2p_back == pytest.approx((0.0, inside, between, inside))
    details = [
        {"rank": 0, "host": "a", "links": [{"pair": [0, 1], "latency_us": 8.0, "gb_per_s": 40.0}]},
        {"rank": 1, "host": "a", "links": [{"pair": [1, 2], "latency_us": 90.0, "gb_per_s": 1.0}]},
        {"rank": 2, "host": "b", "links": []},
    ]
    doctor = tmp_path / "doctor.json"
    doctor.write_text(json.dumps({"findings": [{"check": "channels", "details": details}]}))
    measured = planned(*only, *options, f"links={doctor}")[0].shown.cut.costs.per_stage(4)
    inside, between = 0.008 + 1e3 * num_bytes / 40e9, 0.09 + 1e3 * num_bytes / 1e9
    assert measured.p2p == pytest.approx((inside, between, inside, 0.0))


def test_bytes_of_memory_make_milliseconds_where_it_is_slow() -> None:
    """So slow a memory that all time is its: a stage takes the bytes of its operations."""
    only = ["peak_tflops=1000", "efficiency=1", "memory_gb_per_s=0.001", "schedules=[1f1b]", "show=1f1b"]
    plan, text = planned(*only)
    assert "FLOPs and bytes" in " ".join(text.split()) and "memory at 0.001 GB/s" in " ".join(text.split())
    cut = plan.shown.cut
    costs = cut.costs.per_stage(2)
    record, stages = cut.split.record, cut.split.partition.stage_of_unit
    for stage in range(2):
        parts = [part for call in record.calls if stages[call.unit] == stage for part in (call, call.reads)]
        parts += [record.tail] if stage == 1 else []
        moved = sum(number * work.num_bytes for part in parts for work, number in part.work.items())
        assert costs.forward[stage] == pytest.approx(1e3 * moved / 1e6)


def test_the_memory_of_a_named_device_is_known() -> None:
    only = ["trainer.precision=bf16-true", "schedules=[1f1b]", "show=1f1b"]
    text = planned("device=h100-sxm", *only)[1].replace("\n", " ")
    assert "FLOPs and bytes: 989.4 TFLOP/s" in text and "memory at 2680 GB/s" in text
    assert "times estimated from FLOPs: 2 TFLOP/s" in (text := planned("peak_tflops=2", *only)[1].replace("\n", " "))
    assert "memory not known" in text


def test_units_that_run_alone_give_the_times_of_a_plan(tmp_path: Path) -> None:
    only = ["schedules=[1f1b,zb_v]", "show=1f1b"]
    plan, text = planned("measure=true", "measure_seconds=0.5", f"out={tmp_path}", *only)
    times = plan.costs.unit_times
    assert times is not None and plan.costs.unit == "ms"
    assert times.num_measured == 6, "two embeddings, the first block, three others, norm, head"
    assert "measured: 6 distinct units of 8, each alone on cpu" in " ".join(text.split())
    for planned_one in plan.table.usable:
        cut = planned_one.cut
        costs = cut.costs.per_stage(planned_one.schedule.placement.num_stages)
        for stage in range(planned_one.schedule.placement.num_stages):
            units = cut.split.partition.units_of_stage(stage)
            assert costs.forward[stage] == pytest.approx(sum(times.costs[unit].forward for unit in units))
        sent = max(crossing.forward_bytes for crossing in cut.summary.crossings)
        assert max(costs.p2p) == pytest.approx(0.01 + 1e3 * sent / 25e9), "messages by the link"
    again, said = planned(f"costs={tmp_path / 'costs.json'}", *only)
    assert "measured on units alone" in " ".join(said.split())
    assert again.shown.cut.split.partition.stage_of_unit == plan.shown.cut.split.partition.stage_of_unit
    assert again.shown.step_time == pytest.approx(plan.shown.step_time)


def test_memory_is_parameters_gradients_adam_and_what_microbatches_hold(whole_plan: tuple[Plan, str, Path]) -> None:
    content = read_json(whole_plan[2])
    for schedule in content["schedules"]:
        cut = content["cuts"][schedule["cut"]]
        held = cut["costs"]["held_after_forward"]
        for rank in schedule["memory"]:
            stages = [s for s, its_rank in enumerate(cut["rank_of_stage"]) if its_rank == rank["rank"]]
            own = sum(cut["stages"][stage]["parameter_bytes"] for stage in stages)
            assert (rank["parameters"], rank["gradients"], rank["optimizer_state"]) == (own, own, 2 * own)
            assert rank["activations"] >= max(held[stage] for stage in stages)
            assert rank["peak"] >= 4 * own + rank["activations"]
    gpipe = next(schedule for schedule in content["schedules"] if schedule["name"] == "gpipe")
    assert gpipe["peak_microbatches"] == pytest.approx([NUM_MICROBATCHES] * 2)


def test_microbatches_are_counted_whatever_they_hold() -> None:
    again = "strategy.activation_checkpointing=true"
    for more in ((), (again,)):
        plan, _ = planned("schedules=[gpipe,1f1b]", "strategy.schedule=gpipe", *more)
        counted = {one.name: one.peak_microbatches for one in plan.table.usable}
        assert counted == {"gpipe": (NUM_MICROBATCHES,) * 2, "1f1b": (2, 1)}
    plan, _ = planned("schedules=[gpipe]", "strategy.schedule=gpipe", again, "strategy.activation_offload=true")
    (moved,) = plan.table.usable
    assert 1 <= moved.peak_microbatches[0] < NUM_MICROBATCHES, "what waits on the host is not held"


def test_blocks_that_are_run_again_hold_their_inputs() -> None:
    """Three blocks on a rank: inputs of all microbatches, and in I what one block saves in one microbatch."""
    options = ("schedules=[gpipe]", "strategy.schedule=gpipe")
    plain, less, named = (
        planned(*options, *more)[0].table.usable[0].memory[0]
        for more in (
            (),
            ("strategy.activation_checkpointing=true",),
            ("strategy.activation_checkpointing=['blocks.*']",),
        )
    )
    assert less == named
    inputs = NUM_LAYERS // 2 * BATCH_SIZE * 16 * DIM * 4  # 16 tokens of a sample are fed, the 17th is predicted
    blocks_and_microbatches = NUM_LAYERS // 2 * NUM_MICROBATCHES
    assert inputs < less.activations <= inputs + plain.activations / blocks_and_microbatches
    assert plain.peak - less.peak == plain.activations - less.activations


def test_limit_leaves_out_what_holds_more_and_auto_keeps_it() -> None:
    schedules = ["schedules=[gpipe,1f1b,auto]", "strategy.stages_per_rank=1"]
    free, _ = planned(*schedules)
    by_name = {one.name: one for one in free.table.usable}
    limit = (by_name["gpipe"].peak_bytes + by_name["1f1b"].peak_bytes) / 2
    plan, text = planned(*schedules, f"device_memory_gib={limit / 2**30}")
    fits = {one.name: one.fits for one in plan.table.usable}
    assert (fits["gpipe"], fits["1f1b"]) == (False, True)
    assert all(one.fits for one in plan.table.usable if one.name == "auto")
    assert plan.shown.peak_bytes <= limit
    assert "over the limit" in text


def cut_of_training(config_json: str) -> dict[str, int]:
    """One rank's cut of a run that trains two batches."""
    from omegaconf import DictConfig, OmegaConf

    from lightning_pp.cli.run import Run
    from lightning_pp.conf import Mode

    config = OmegaConf.create(json.loads(config_json))
    assert isinstance(config, DictConfig)
    config.mode = Mode.fit
    run = Run.build(config)
    run.execute()
    return dict(run.trainer.strategy.engine.split.partition.stage_of_unit)  # type: ignore[attr-defined]


def test_the_strategys_own_limit_moves_cuts_as_in_training(pool: WorkerPool) -> None:
    from omegaconf import OmegaConf

    # the first block is said to be as slow as four, so that the second rank has more of them than the first
    skewed = ["strategy.schedule=1f1b", "strategy.unit_weights={blocks.0:4.0}"]
    only = [*skewed, "schedules=[1f1b]", "show=1f1b"]
    free, _ = planned(*only)
    limited = f"strategy.device_memory_gib={0.97 * free.shown.peak_bytes / 2**30}"
    plan, text = planned(*only, limited)
    assert plan.shown.fits and plan.shown.peak_bytes <= 0.97 * free.shown.peak_bytes
    cut = dict(plan.shown.cut.split.partition.stage_of_unit)
    assert cut != dict(free.shown.cut.split.partition.stage_of_unit)
    quiet = ["trainer.enable_progress_bar=false", "+trainer.enable_checkpointing=false"]
    few = ["trainer.max_steps=2", "trainer.default_root_dir=null", "trainer.num_sanity_val_steps=0"]
    config = plan_config(*skewed, limited, *quiet, *few)
    container = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    assert pool.run(cut_of_training, json.dumps(container), world_size=2, timeout=120) == [cut, cut]
    assert "over the limit" not in text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["show=zb_h9"], "unknown schedule 'zb_h9'. Choose one of "),
        (["schedules=[zb_h9]"], "unknown schedule 'zb_h9'"),
        (["strategy.schedule=zb_h9"], "zb_h9"),
        (["costs=nope.json"], "costs=nope.json does not exist"),
        (["strategy.rank_speeds=[1, 0]"], "rank_speeds"),
        (["device=h1000"], "device=h1000 is not known. Choose one of "),
        (["efficiency=1.5"], "efficiency=1.5 must be at most 1"),
        (["peak_tflops=0"], "peak_tflops=0"),
        (["memory_gb_per_s=-1"], "memory_gb_per_s=-1"),
        (["node_link_latency_us=-1"], "node_link_latency_us=-1.0 must be a number 0 or more"),
        (["link_gb_per_s=0"], "link_gb_per_s=0.0 must be a number above 0"),
        (["links=nowhere.json"], "links=nowhere.json has no latency and bandwidth between ranks (FileNotFoundError"),
        (["measure=true", "costs=costs.json"], "measure=true and costs=costs.json both say how long units take"),
        (["measure=true", "measure_seconds=-1"], "measure_seconds=-1"),
        (["strategy=auto"], "not a pipeline"),
        (["trainer.devices=3", "strategy.pipeline_parallel_size=2", "strategy.data_parallel_size=1"], "devices=2"),
        (["trainer.accelerator=gpu", "trainer.devices=auto"], "trainer.devices=NUMBER"),
        (["trainer.devices=12"], "12 stages need at least 12 units"),
        (["device_memory_gib=1e-6", "schedules=[1f1b]"], "device_memory_gib=1e-06 is too small for every schedule"),
        (["strategy.device_memory_gib=1e-6"], "keeps every rank within device_memory_gib=1e-06 under zb_h1 with 4"),
        (["strategy.device_memory_gib=0"], "device_memory_gib=0.0 must be a number above 0"),
        (["data.files=[nope.txt]"], "nope.txt: does not exist"),
        (["model.num_heads=5"], "num_heads=5"),
    ],
)
def test_mistake_is_one_message_and_exit_code_1(
    overrides: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        run_plan(plan_config(*overrides))
    captured = capsys.readouterr()
    assert "lightning-pp-plan: " in captured.err
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_unreadable_or_unfitting_costs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"

    def said() -> str:
        with pytest.raises(SystemExit, match="1"):
            run_plan(plan_config(f"costs={path}"))
        return capsys.readouterr().err

    path.write_text("{")
    assert str(path) in said()
    StageCosts([1.0, 1.0, 1.0], 1.0, 1.0).to_json(path)
    assert "are for 3 stages, but 2 ranks have a multiple of 2" in said()
    StageCosts([1.0] * 4, 1.0, 1.0).to_json(path)
    assert "has costs of 4 stages, but the configured pipeline has 2" in said()


def test_schedule_that_needs_more_stages_than_there_are_units_is_left_out_with_the_reason() -> None:
    plan, text = planned("trainer.devices=6", "schedules=[1f1b,zb_v]", "strategy.num_microbatches=8")
    assert [one.name for one in plan.table.unusable] == ["zb_v"]
    assert "not possible: zb_v, 2 a rank: 12 stages need at least 12 units" in text


def test_schedules_are_those_of_build_schedule(whole_plan: tuple[Plan, str, Path]) -> None:
    for one in whole_plan[0].table.usable:
        if one.name == "auto":
            continue
        built = build_schedule(
            one.name,
            num_ranks=2,
            num_microbatches=NUM_MICROBATCHES,
            stages_per_rank=one.stages_per_rank,
            costs=one.cut.costs,
        )
        assert built.programs == one.schedule.programs
        assert one.schedule.simulate(one.cut.costs).makespan == pytest.approx(one.step_time)


def test_price_of_whole_batch_loss_is_told_beside_what_would_be_without(tmp_path: Path) -> None:
    """Against schedules built and simulated here, with the costs that the plan tells."""
    names = ["gpipe", "1f1b", "zb_h1", "v_half"]
    whole = "strategy.whole_batch_loss=true"
    plan, text = planned(whole, f"schedules=[{','.join(names)}]", "device=a100", "show=configured", f"out={tmp_path}")
    content = read_json(tmp_path)
    assert [entry["name"] for entry in content["schedules"]] == names
    for entry in content["schedules"]:
        cut = content["cuts"][entry["cut"]]
        costs = StageCosts(**cut["costs"])
        sizes = {"num_ranks": 2, "num_microbatches": NUM_MICROBATCHES, "costs": costs}
        held = [0.0, 0.0]
        for stage, rank in enumerate(cut["rank_of_stage"]):
            held[rank] += cut["costs"]["held_after_forward"][stage]
        before = entry["without_whole_batch_loss"]
        for one, is_whole in ((entry, True), (before, False)):
            simulation = build_schedule(entry["name"], **sizes, whole_batch_loss=is_whole).simulate(costs)
            assert one["step_time"] == pytest.approx(simulation.makespan)
            assert one["bubble_fraction"] == pytest.approx(float(simulation.bubble_fraction))
            assert one["whole_batch_loss"] is is_whole
        assert [rank["activations"] for rank in entry["memory"]] == [NUM_MICROBATCHES * round(one) for one in held]
        assert before["without_whole_batch_loss"] is None
        kinds = ["".join(cell.strip("0123456789") for cell in program.split(",")) for program in entry["programs"]]
        assert all("F" not in row.lstrip("F") for row in kinds)
    shown = content["schedules"][content["shown"]]
    assert shown["name"] == "zb_h1"
    before = shown["without_whole_batch_loss"]
    assert f"all {NUM_MICROBATCHES} microbatches are held at once. With zb_h1 a step in a row takes" in text
    assert f"({shown['time_in_a_row'] / before['time_in_a_row'] - 1:+.1%})" in text
    bubbles = f"{shown['bubble_fraction']:.1%} with it and {before['bubble_fraction']:.1%} without"
    assert f"The bubble is {bubbles}." in text
    assert plan.shown.without is not None and not plan.shown.without.schedule.whole_batch_loss


def test_without_whole_batch_loss_no_price_is_told(whole_plan: tuple[Plan, str, Path]) -> None:
    assert "whole_batch_loss" not in whole_plan[1]
    assert all(entry["without_whole_batch_loss"] is None for entry in read_json(whole_plan[2])["schedules"])


@pytest.mark.nightly
def test_a_device_that_cannot_hold_whole_batches_is_too_small(tmp_path: Path) -> None:
    """A limit that auto keeps with fewer microbatches at a time is over with all of them."""
    options = ("schedules=[auto]", "strategy.schedule=auto", "strategy.num_microbatches=8", "data.batch_size=64")
    free = planned(*options, "strategy.memory_limit_gib=0.01")[0].shown
    limit = 1.01 * free.peak_bytes / (1 << 30)
    assert planned(*options, f"device_memory_gib={limit}")[0].shown.fits
    with pytest.raises(
        UserError, match=rf"device_memory_gib={limit:g} is too small.*use fewer samples in a batch: with whole"
    ):
        planned(*options, f"device_memory_gib={limit}", "strategy.whole_batch_loss=true")


def test_nothing_of_the_model_has_memory(whole_plan: tuple[Plan, str, Path]) -> None:
    module = whole_plan[0].cutter.module
    assert all(parameter.is_meta for parameter in module.parameters())
    assert torch.get_default_dtype() == torch.float32
