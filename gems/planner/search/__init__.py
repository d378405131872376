"""One plan over partitions, replicas, schedule, cap, micro-batches and memory policy.

What there is to choose, and the search.
"""
