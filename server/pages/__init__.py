"""HTML pages: status and graph table."""
