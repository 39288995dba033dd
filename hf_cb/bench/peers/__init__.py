"""Programs that run one peer each, in the peer's own Python: they import nothing of hf_cb.

`run_NAME.py` reads lines of JSON from standard input and answers each with a line of JSON. The first is the job,
answered once the peer is ready; each other one is a workload, answered with its result. See `peer_loop.py`.
"""
