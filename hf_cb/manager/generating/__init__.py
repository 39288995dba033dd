"""`model.generate` of an accelerated model, through the engine.

`generate` itself prepares the call, as ever: it merges and checks options, warns, builds processors and stopping
criteria, hands the prompt to the streamer. Only the loop that then decodes, its `_sample`, is ours, where `coverage`
finds that the engine answers the same; else the original loop runs on what `generate` has prepared.
"""
