"""Guards of captures: what a run reads and changes besides its tensors, and whether that is as it was.

Reading order: values, ownership, namespaces, search, changes, code, watch, observation.
"""
