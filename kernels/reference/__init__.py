"""Each operation of the engine in plain torch: CPU workers run it, and every other kernel is tested against it.

Knows tensors and block tables, never models, jobs or schedules.

    T tokens of a step     H query heads      D head dimension      N blocks of the pool    V vocabulary
    R rows of a step       K key/value heads  L tokens of context   P tokens per block      S rows that sample

A KV pool is one tensor for each layer, `kv_NP2KD`: key and value of a token are adjacent, so one copy writes both, one
gather reads both, and a block is one contiguous page; `kernels.kv_pages` defines its formats. Block 0 belongs to no
sequence: it is all zeros and pads block tables.
"""
