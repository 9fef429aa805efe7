"""How new policy weights get from the trainer into an engine, and how both sides know that they are the same.

    trainer model -> PolicyWeights (gather, merge, engine-facing names) -> buckets -> transport -> engine -> Ack

`base` has the types of that line, `digest` the checksum. `policy` reads the trainer's model, `sync` decides when and
sends again what failed. `sending` is the trainer's end for engines elsewhere, and a file per transport carries the
bytes: `object_store`, `broadcast`, `disk`.
"""
