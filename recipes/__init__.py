"""Complete runs (``recipe/*.yaml``, overrides only) and the ordinary user code they train.

The modules here are written as any Lightning user would write them: nothing in them knows of pipelines.
"""
