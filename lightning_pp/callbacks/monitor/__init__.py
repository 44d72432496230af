"""What ``PipelineMonitor`` is made of: numbers, timelines and findings of a fit, and where they are written."""
