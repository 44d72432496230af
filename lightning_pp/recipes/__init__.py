"""The ordinary user code that the recipes (``recipes/recipe/*.yaml``, overrides only) train.

The modules here are written as any Lightning user would write them: nothing in them knows of pipelines.
"""
