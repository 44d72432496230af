"""Every command of the documentation is run as it stands there, at a size of seconds, in the folder that it needs.

What a line names (texts, checkpoints, runs, modules) is made first. Overrides are added that shrink models, and runs to
two processes of one node; ``tests/cli/test_cli_launch.py`` has two nodes. Left out is what needs another machine:
Docker, Slurm, Kubernetes, clouds.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from command import Finished, run_forked
from test_code_blocks import DOCS, PAGES, blocks
from test_configs import TINY, TINY_TEXT

pytestmark = pytest.mark.nightly

MODULES = {
    "lightning-pp-plan": "lightning_pp.cli.plan.command",
    "lightning-pp-verify": "lightning_pp.cli.verify",
    "lightning-pp-data": "lightning_pp.cli.data.command",
    "lightning-pp-export": "lightning_pp.cli.export.command",
    "lightning-pp-report": "lightning_pp.cli.past_runs.command",
    "lightning-pp-doctor": "lightning_pp.doctor",
    "lightning-pp": "lightning_pp",
}
OWN_MODULE = """
import lightning as L
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class MyModule(L.LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
        self.embedding, self.head = torch.nn.Embedding(256, width), torch.nn.Linear(width, 256)

    def training_step(self, batch, batch_idx):
        logits = self.head(self.layers(self.embedding(batch["input_ids"])))
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    def train_dataloader(self):
        return torch.utils.data.DataLoader([{"input_ids": torch.zeros(16, dtype=torch.int64)}] * 8, batch_size=8)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class LitLlama(L.LightningModule):
    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))

    def training_step(self, batch, batch_idx):
        return self.model(batch["input_ids"], labels=batch["input_ids"]).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def make_batch():
    return {"input_ids": torch.zeros(8, 16, dtype=torch.int64)}
"""
SMALL = [
    *(
        "trainer=cpu",
        "trainer.devices=2",
        "trainer.num_nodes=1",
        "trainer.precision=32-true",
        "trainer.val_check_interval=2",
    ),
    *("trainer.enable_progress_bar=false", "data.batch_size=4", "strategy.pipeline_parallel_size=2"),
    *("strategy.num_microbatches=2", "logger=none"),
]
#: Trained once, under the names of the documentation.
RUN, ELSEWHERE, REPORTED = "outputs/2026-01-01/10-00-00", "outputs/...", ("22-30-00", "22-30-45")
#: Which run's checkpoint the export of `last.ckpt` to a target is about.
EXPORTED = {"gpt2/": "gpt2_124m", "llama/": "own", "adapter/": "lora", "tuned/": "lora"}
#: Pages whose commands other tests run: ``test_code_blocks.py``.
ELSEWHERE_RUN = {"tutorial"}


def run(words: list[str], folder: Path, num_processes: int = 1) -> Finished:
    finished = run_forked(words[1:], folder, num_processes, 300.0, MODULES[words[0]])
    assert finished.code == 0, f"{shlex.join(words)}\n{finished.output}"
    return finished


def train(recipe: str, folder: Path, run_dir: str, *overrides: str, steps: int = 4) -> None:
    given = [f"recipe={recipe}", *SMALL, *TINY_TEXT, *TINY[recipe], *overrides]
    run(["lightning-pp", *given, f"trainer.max_steps={steps}", f"hydra.run.dir='{run_dir}'"], folder, num_processes=2)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the documentation's commands read."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("place")
    text = "It is a truth universally acknowledged.\n" * 400
    for name in ("my.txt", "more/notes.md", "corpus/a.txt", "corpus/b.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    lines = [{"text": text[:400], "content": text[:400]}] * 50
    for name in ("web.jsonl", "notes.jsonl"):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for number in range(2):
        Dataset.from_list(lines).to_parquet(folder / f"part-{number}.parquet")
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = Tokenizer(models.BPE({**dict(list(vocabulary.items())[:-1]), "<|endoftext|>": 255}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel()
    letters.save(str(folder / "tokenizer.json"))
    for name in ("llama", "qwen3-0.6b"):
        config = AutoConfig.for_model(
            "llama", vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<|endoftext|>").save_pretrained(folder / name)
    (folder / "my_package").mkdir()
    for name in ("my_package/__init__.py", "my_package/my_module.py", "my_module.py"):
        (folder / name).write_text(OWN_MODULE)
    (folder / "arguments.yaml").write_text("width: 8\n")
    (folder / "my_conf" / "model").mkdir(parents=True)
    (blocked,) = [block for block in blocks(DOCS / "training" / "recipes.md", "yaml") if "_target_" in block]
    (folder / "my_conf" / "model" / "mine.yaml").write_text(blocked)
    train("byte_gpt", folder, RUN, steps=100)
    for name in REPORTED:
        shutil.copytree(folder / RUN, folder / "outputs/2026-11-24" / name)
    train("lora", folder, ELSEWHERE, "model.directory=llama")
    checkpoints = folder / ELSEWHERE / "checkpoints"
    (checkpoints / "step4.ckpt").rename(checkpoints / "step500.ckpt")
    shutil.copytree(folder / RUN / "checkpoints/step100.ckpt", checkpoints / "step100.ckpt")
    train("lora", folder, "lora", "model.directory=llama")
    train("gpt2_124m", folder, "gpt2_124m")
    train("own", folder, "own", "model._target_=my_package.LitLlama", "~model.num_layers", "~model.dim")
    train("llama", folder, "llama_run", "strategy.save_costs=costs.json", "strategy.schedule=zb_v", steps=12)
    run(["lightning-pp-data", "corpus/a.txt", "--lines", "--output", "tokens"], folder)
    run(["lightning-pp-doctor", "--only", "channels", "--json", "links.json"], folder)
    return folder


def commands(page: Path) -> list[tuple[dict[str, str], list[str]]]:
    """The lines that start a command of this package: variables before it, and its words; without torchrun's."""
    found = []
    for line in "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines():
        if not re.match(r"([A-Z_]+=\S+ )*(lightning-pp|torchrun)", line):
            continue
        words = shlex.split(line, comments=True)
        given = list(itertools.takewhile(lambda word: re.match(r"[A-Z_]+=", word), words))
        words = words[len(given) :]
        if words and words[0] == "torchrun" and "lightning_pp" in words:
            words = ["lightning-pp", *words[words.index("lightning_pp") + 1 :]]
        if words and words[0] in MODULES:
            found.append((dict(each.split("=", 1) for each in given), words))
    return found


def as_run(words: list[str], folder: Path) -> list[list[str]]:
    """What is run for a line: small, with patterns expanded, and with and without what is in brackets."""
    command, *arguments = words
    if command == "lightning-pp-data":
        found = [sorted(str(path.relative_to(folder)) for path in folder.glob(each)) or [each] for each in arguments]
        return [[command, *itertools.chain(*found)]]
    if command == "lightning-pp-export" and arguments[0] == "last.ckpt":
        run_dir = EXPORTED.get(arguments[1], "gpt2_124m")
        target = arguments[1].replace("llama/", "exported/")  # llama/ is there, as the base of the adapter
        return [[command, f"{run_dir}/checkpoints/step4.ckpt", target, *arguments[2:]]]
    if command == "lightning-pp-report" and "[RUN_DIR]" in arguments:
        one, other = (f"outputs/2026-11-24/{name}" for name in REPORTED)
        rest = [argument for argument in arguments if "RUN_DIR" not in argument]
        return [[command, one, *rest], [command, one, other, *(each.replace("report.", "both.") for each in rest)]]
    if command == "lightning-pp-doctor":
        return [[command, *(arguments or ["--only", "environment"])]]  # tests/doctor has the others
    if command in ("lightning-pp", "lightning-pp-plan", "lightning-pp-verify") and not is_answered(arguments):
        return [[command, *arguments, *shrinking(arguments, command)]]
    return [words]


def is_answered(arguments: list[str]) -> bool:
    """Whether nothing has to be small: help and the like, a run that goes on, a class that is checked."""
    begin = ("--cfg", "--help", "--version", "resume=")
    return any(a.startswith(begin) or (":" in a and "=" not in a) for a in arguments)


def shrinking(arguments: list[str], command: str) -> list[str]:
    recipe = next((each.removeprefix("recipe=") for each in arguments if each.startswith("recipe=")), "byte_gpt")
    of_model = [] if "model=mine" in arguments else TINY[recipe]
    text = ["data.seq_len=16"] if {"data=tokens", "data=packed_tokens", "data=stream"} & set(arguments) else TINY_TEXT
    if "data=packed_tokens" in arguments:  # a small row has one document, which is not cut
        text.append("strategy.num_microbatches=1")
    added = [*SMALL, *text, *of_model]
    if "strategy=auto" in arguments:
        added = [each for each in added if not each.startswith(("strategy.", "trainer.devices"))]
    if any(each.startswith("strategy.schedule=") for each in arguments):
        added.append("strategy.num_microbatches=4")
    if command == "lightning-pp":
        done = 100 if any(each.startswith("ckpt_path=") for each in arguments) else 0
        added.append(f"trainer.max_steps={done + 2}")
    return added


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page) and page.stem not in ELSEWHERE_RUN], ids=lambda page: page.stem
)
def test_commands_run(page: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "place"
    shutil.copytree(place, folder)
    if page.stem == "data":
        shutil.rmtree(folder / "tokens")  # which a line there makes
    for variables, words in commands(page):
        with monkeypatch.context() as context:
            for name, value in variables.items():
                context.setenv(name, value)
            for each in as_run(words, folder):
                alone = each[0] != "lightning-pp" or each[1:2] in (["--cfg"], ["--help"], ["--version"])
                run(each, folder, 1 if alone or "trainer.devices=1" in each else 2)
