"""One device: the model runner, its decode and prefill graphs, input buffers, async outputs, memory sizing."""
