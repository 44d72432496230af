"""What ranks hold, and cuts within what they may hold."""
