"""Choose buckets, token budgets and numbers of documents with the least expected padding. Pure Python."""
