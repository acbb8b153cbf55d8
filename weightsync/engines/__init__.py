"""Engine adapters: one a kind of engine. `torch_module` needs torch alone; `vllm` is imported inside vLLM's workers."""
