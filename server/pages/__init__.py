"""HTML pages: one self-contained document each, assembled from the files in `static/`."""
