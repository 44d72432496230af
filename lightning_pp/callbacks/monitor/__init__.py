"""Parts of ``PipelineMonitor``: numbers, timelines and findings of a fit, and their outputs."""
