"""The pages that a browser gets: one document each, assembled from the files in `static/`."""
