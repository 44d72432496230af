"""One step of all ranks as a picture: text, SVG, HTML, trace."""
