"""One step of all ranks as a picture: text, a page, a trace."""
