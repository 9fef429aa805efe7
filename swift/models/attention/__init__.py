"""Attention of packed streams: segments that see themselves and the prompt they share.

spans        what a segment is, and what a layer's attention does beside a softmax of scaled products
rows         masked SDPA over blocks of rows: every device, every layer, and the oracle
flex         FlexAttention under one block mask
flash        flash-attn's variable-length kernel
layout       the segments of one stream, and which of these kernels computes them
forked       the segments as rows of two passes, for layers that cannot be packed
strided      blocks that continue documents from many places, as one more layout
sequence_parallel   one stream on several ranks, over any of these
interface    how a model's layers come to ask the layout
choice       which models may be packed or forked, which is tried out
"""
