"""hf_cb measured against its peers, in one process and on one loaded model."""
