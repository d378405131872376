"""One plan over partitions, replicas, schedule, cap, micro-batches and memory policy: what there is to choose, and the search."""
