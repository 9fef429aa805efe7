"""How new policy weights get from the trainer into an engine, and how both sides know that they are the same.

    trainer model -> PolicyWeights (gather, merge, engine-facing names) -> buckets -> transport -> engine -> Ack

`base` holds the words of that sentence, `policy` reads the trainer's model, `publisher` decides when and checks the
answers; a file per transport carries the bytes.
"""
