"""The application: ``python -m my_project.train``, with overrides as ``strategy.schedule=1f1b``."""

from __future__ import annotations

import lightning as L
from omegaconf import DictConfig

from lightning_pp.cli import hydra_main
from lightning_pp.conf import build


@hydra_main(config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    """Builds what the config names and trains it."""
    L.seed_everything(config.seed, workers=True, verbose=False)
    model, data = build(config.model), build(config.data)
    callbacks = [build(each) for each in config.callbacks.values() if each is not None]
    strategy = build(config.strategy)
    trainer = build(config.trainer, strategy=strategy, logger=False, callbacks=callbacks)
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        print(f"train_loss after {trainer.global_step} steps: {float(trainer.callback_metrics['train_loss']):.3f}")  # noqa: T201


if __name__ == "__main__":
    main()
