"""What the unsplit module holds, which ranks hold it now, and how these agree."""
