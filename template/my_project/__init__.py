"""A LightningModule of my own, trained as a pipeline."""
