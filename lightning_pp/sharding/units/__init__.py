"""One group of units: gathered, freed and reduced together."""
